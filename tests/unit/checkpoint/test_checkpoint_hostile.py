"""Small files that ask for much: memory in proportion to their size, an answer in seconds, and nothing called."""

import contextlib
import json
import pickle
import struct
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smpc.checkpoint import Alone, Content, Root, Shard, open_source, read_file, save
from smpc.checkpoint.format.inert_pickle import PickledPairs, PickledRecord, expanded, parse
from smpc.checkpoint.format.manifest import Manifest, _canonical_manifest, _sealed_manifest
from smpc.checkpoint.format.regions import Box, find_gap
from smpc.errors import CheckpointError

SECONDS, MEMORY = 60.0, 400 << 20  # of which torch's own first use takes most


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def check_refused(work, match):
    """That it is refused, soon, and within little memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again at what is used now
    before, begin = status("VmRSS"), time.monotonic()
    with pytest.raises(CheckpointError, match=match):
        work()
    assert time.monotonic() - begin < SECONDS
    assert status("VmHWM") - before < MEMORY


def op(text, *numbers):
    return text.encode("latin-1") + struct.pack("<" + "I" * len(numbers), *numbers)


NESTED = b"\x80\x02)" + b"".join(op("q\x01h\x01\x86") for _ in range(60))  # a pair of the pair of the pair ...
PICKLES = {
    "a memo of 4 billion": b"\x80\x02N" + op("r", 0xFFFFFFF0) + b".",  # 9 bytes
    "a text of 4 GiB": b"\x80\x02" + op("X", 0xFFFFFFFF) + b"x.",
    "bytes of 4 GiB": b"\x80\x03" + op("B", 0xFFFFFFFF) + b"x.",
    "an array of 4 GiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b"x.",
    "a number of 200 bytes": b"\x80\x02\x8a\xc8" + b"\x7f" * 200 + b".",
    "a number of 16 MiB": b"\x80\x02\x8b" + struct.pack("<i", 1 << 24) + b"\x7f" * 100 + b".",
    "decimal digits": b"I" + b"9" * 5000 + b"\n.",
    "pairs of pairs": NESTED + b".",
    "pairs of pairs as a key": b"\x80\x02}" + NESTED[2:] + b"Ns.",
    "no end": b"\x80\x02]" * 1000,
    "marks": b"(" * 100_000 + b"t.",
    "nothing": b"",
    "a call": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
}


@pytest.mark.parametrize("what", PICKLES)
def test_pickles_of_torchs_metadata(tmp_path, what):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(PICKLES[what])
    check_refused(lambda: open_source(tmp_path / "dcp"), r"\.metadata: ")


@pytest.mark.parametrize("what", ["pairs of pairs as a key", "pairs of pairs", "a call", "no end"])
def test_pickles_in_archives_of_torch_save(tmp_path, what):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, PICKLES[what] if name.endswith("data.pkl") else data)
    check_refused(lambda: read_file(str(path)), r"x\.pt")


def test_archives_that_would_grow(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + b"N" * (1 << 26) + b".")
    assert path.stat().st_size < 1 << 20
    check_refused(lambda: read_file(str(path)), "is compressed; torch.save compresses none")
    torch.save({"w": torch.ones(1).expand(1 << 40)}, path)
    check_refused(lambda: open_source(path), r"w: expanded tensors, of far more elements than the file has")


def test_a_flipped_bit_of_torch_saves_files_is_told(tmp_path):
    """torch itself does not look at the checksums of its archives."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    position = data.index(torch.arange(1000.0).numpy().tobytes()) + 2001
    data[position] ^= 4
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["w"], torch.arange(1000.0)), "torch loads it"
    with pytest.raises(CheckpointError, match=r"x\.pt: damaged: its record x/data/0 does not have its checksum"):
        read_file(str(path))


@pytest.fixture
def folder(tmp_path):
    state = {"model": {"w": torch.arange(12.0).view(3, 4)}, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def change_metadata(folder, change):
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def read_all(folder):
    with open_source(folder) as source:
        for item in source.items:
            source.read(item)


def test_what_torchs_metadata_says_is_not_believed(folder):
    read_all(folder)
    original = (folder / ".metadata").read_bytes()

    def larger(found):
        tensor = found.state_dict_metadata["model.w"]
        tensor.size = torch.Size([3 << 40, 4])
        tensor.chunks[0].sizes = torch.Size([3 << 40, 4])

    def many_dims(found):
        tensor = found.state_dict_metadata["model.w"]
        tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 60] * 1000)

    def many_groups(found):
        found.planner_data = {
            key: ("optimizer", "param_groups", 1 << 40, "lr") if "lr" in key else path
            for key, path in found.planner_data.items()
        }

    for change, match in (
        (larger, "is not what .metadata says"),
        (many_dims, "64 dimensions"),
        (many_groups, "no parameter group"),
    ):
        change_metadata(folder, change)
        check_refused(lambda: read_all(folder), match)
        (folder / ".metadata").write_bytes(original)
    read_all(folder)


def test_a_flipped_bit_in_torchs_tensors_is_told(folder):
    (path,) = folder.glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(12.0).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"distcp: model\.w: damaged"):
        read_all(folder)


def header(**tensors):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


SHAPES = {
    "more dimensions than torch has": [1] * 65,
    "a million dimensions": [1 << 61] * 1_000_000,
    "elements beyond counting, of no bytes": [0, 1 << 57, 1 << 57],
    "a negative size": [-1, -8],
    "a size that is no number": [True],
}


@pytest.mark.parametrize("what", SHAPES)
def test_headers_of_safetensors(tmp_path, what):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header(w={"dtype": "F32", "shape": SHAPES[what], "data_offsets": [0, 0]}))
    check_refused(lambda: open_source(path), r"x\.safetensors: the header is damaged")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"w":' * 50_000,
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": [-8, -8]}}',
        b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"w": {"dtype": "F32", "shape": 1e999, "data_offsets": [0, 0]}}',
    ],
)
def test_texts_of_headers(tmp_path, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    check_refused(lambda: open_source(path), r"x\.safetensors: ")


def sealed_manifest(tmp_path, change):
    save(Root(tmp_path / "run"), "s", Content([Shard.whole("model", "w", torch.ones(4))]), Alone())
    body = json.loads((tmp_path / "run" / "s" / "manifest.json").read_text())["body"]
    change(body)
    return _sealed_manifest(_canonical_manifest(body))


@pytest.mark.long
def test_manifests_with_a_good_sum(tmp_path):
    """Whoever writes both files and manifest can make it say anything; not: take gigabytes, or hours."""

    def pieces(body):
        body["files"]["model_00000.safetensors"][0] = 1 << 40
        body["tensors"] = [
            [
                "model",
                "w",
                "U8",
                [1, 60_000],
                [["model_00000.safetensors", 200 + i, [0, i // 2 * 2], [1, 1], [0]] for i in range(60_000)],
            ]
        ]

    changes = {
        "share bytes|overlap|belong to no shard": pieces,
        "of 1152921504606846976 ranks": lambda body: body.update(world_size=1 << 60),
        "64 dimensions": lambda body: body["tensors"][0].__setitem__(3, [1 << 60] * 10_000),
    }
    for match, change in changes.items():
        text = sealed_manifest(tmp_path / str(len(match)), change)
        check_refused(lambda text=text: Manifest.from_json(text, "manifest.json"), match)


@pytest.mark.parametrize("depth", [100, 400, 480, 900, 20_000])
def test_values_that_are_nested_deeply_load_or_are_refused(tmp_path, depth):
    """Whatever the interpreter's stack has room for."""
    text = "[" * depth + "]" * depth
    path = tmp_path / "run" / "s" / "manifest.json"
    plain = sealed_manifest(tmp_path, lambda body: body.update(metadata="here"))
    body = plain[len('{"body":') : plain.rindex(',"sha256"')].replace('"here"', text)
    path.write_text(_sealed_manifest(body))
    expected = pytest.raises(CheckpointError, match=r"RecursionError|nested too deeply")
    with {100: contextlib.nullcontext(), 20_000: expected}.get(depth, contextlib.suppress(CheckpointError)):
        open_source(path.parent).__exit__(None, None, None)


# The reader of pickles ------------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text(), inner)
    ),
)


def thawed(value):
    if isinstance(value, PickledPairs):
        return {key: thawed(item) for key, item in value}
    if isinstance(value, (list, tuple)):
        return type(value)(map(thawed, value))
    return value


@pytest.mark.long
@settings(max_examples=examples(100), deadline=None, database=None)
@given(value=PLAIN, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_reads_them(value, protocol):
    assert thawed(parse(pickle.dumps(value, protocol))) == value


@settings(max_examples=examples(200), deadline=None, database=None)
@given(data=st.binary(max_size=200))
@example(data=b"(.")  # ends with a mark for its object
def test_junk_is_refused(data):
    """Or is a plain value by chance: nothing else comes out, and no other error."""
    try:
        found = type(parse(data))
    except CheckpointError as error:
        found = type(error)
    assert found in (
        CheckpointError,
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        list,
        tuple,
        PickledPairs,
        PickledRecord,
    )


def test_names_become_records_and_are_not_imported():
    found = parse(pickle.dumps(Path("/a/b")))
    assert isinstance(found, PickledRecord)
    assert (found.name.split(".")[-1], found.args) == ("PosixPath", ("/", "a", "b"))
    assert isinstance(parse(pickle.dumps(torch.float32)), PickledRecord)
    with pytest.raises(CheckpointError, match=r"it names os\.nothing_of_the_kind, which"):
        parse(b"\x80\x02cos\nnothing_of_the_kind\n.", lambda name: False)


def test_what_is_shared_counts_every_time():
    shared = (1, 2)
    assert expanded([shared, shared], 100) == 7
    circle = PickledPairs()
    circle.append(("self", circle))
    with pytest.raises(CheckpointError, match="contains itself"):
        expanded(circle, 100)
    for _ in range(100):
        shared = (shared, shared)
    with pytest.raises(CheckpointError, match="more than 1000 objects"):
        expanded(shared, 1000)


# Boxes ---------------------------------------------------------------------------------------------------------------


def count_covered(shape, boxes):
    covered = torch.zeros(shape)
    for box in boxes:
        covered[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))] += 1
    return covered


@st.composite
def boxes_of(draw):
    """A tensor cut into boxes, of which some may be moved, doubled or lost."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        box = boxes[index]
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            at = draw(st.integers(1, box.shape[dim] - 1))
            parts = [(0, at), (at, box.shape[dim])]
            boxes[index : index + 1] = [
                Box(
                    tuple(o + low if d == dim else o for d, o in enumerate(box.offsets)),
                    tuple(high - low if d == dim else n for d, n in enumerate(box.shape)),
                )
                for low, high in parts
            ]
    act = draw(st.sampled_from(["none", "lose", "double", "move"]))
    index = draw(st.integers(0, len(boxes) - 1))
    box = boxes[index]
    if act == "lose":
        del boxes[index]
    elif act == "double":
        boxes.append(box)
    elif act == "move":
        boxes[index] = Box(tuple(draw(st.integers(0, n - m)) for n, m in zip(shape, box.shape, strict=True)), box.shape)
    return shape, draw(st.permutations(boxes))


@settings(max_examples=examples(300), deadline=None, database=None)
@given(case=boxes_of())
def test_boxes_tile_a_tensor_if_they_cover_each_element_once(case):
    shape, boxes = case
    assert (find_gap(shape, boxes) is None) == bool((count_covered(shape, boxes) == 1).all())


def test_many_boxes_are_checked_in_seconds():
    begin = time.monotonic()
    columns = [Box((0, i), (1, 1)) for i in range(50_000)]
    assert find_gap((1, 50_000), columns) is None
    assert find_gap((1, 50_000), columns[1:]) == "1 of 50000 elements belong to no shard"
    assert time.monotonic() - begin < 4 * SECONDS
