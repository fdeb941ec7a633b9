"""report.html: complete, inert whatever the names are, self-contained, and alive in a real browser.

The module tree: against the model itself.
"""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import io
import json
import re

import pytest
import torch
from report_browser import axe, browser
from report_cases import HOSTILE, NUM_PARAMETERS, WIDTH, WORSE, Net, compilation

from smpc.compile.options import PipelineOptions
from smpc.report.advice import outlook
from smpc.report.format import format_bytes, format_number, format_time
from smpc.report.page import module_tree, render_page
from smpc.report.plot import render_plot


@pytest.fixture(scope="module")
def page():
    return _render(compilation())


def _render(found):
    return render_page(found)


class _Elements(html.parser.HTMLParser):
    """Elements of a page as (tag, attributes, text inside)."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append([tag, dict(attributes), ""])

    def handle_data(self, data):
        if self.found:
            self.found[-1][2] += data


def _elements(page, tag):
    return [(attributes, text) for found, attributes, text in _Elements(page).found if found == tag]


def _data(page):
    return next(json.loads(text) for attributes, text in _elements(page, "script") if attributes.get("id") == "data")


def _names(node):
    return [node[0], *(name for child in node[5] for name in _names(child))]


def test_page_has_the_numbers_of_the_plan(page):
    plan = compilation().plan
    data = _data(page)
    assert (data["num_ranks"], data["num_stages"]) == (3, 3)
    assert data["step_time"] == plan.schedule.step_time
    events = [(rank, *event) for rank, events in enumerate(data["events"]) for event in events]
    assert len(events) == 2 * 3 * 4
    assert {(rank, stage) for rank, stage, *_ in events} == {(0, 0), (1, 1), (2, 2)}
    assert max(event[-1] for event in events) == plan.schedule.step_time
    assert [rank["peak"] for rank in data["memory"]] == [stage.peak_memory_bytes for stage in plan.stages]
    cells = [text for _, text in _elements(page, "td")]
    assert data["tree"][3] == NUM_PARAMETERS
    assert format_number(sum(stage.num_parameters for stage in plan.stages)) in cells
    assert all(
        stage.modules == () or any("block" in cell or "script" in cell for cell in cells) for stage in plan.stages
    )


def test_names_of_modules_are_inert_text(page):
    elements = _Elements(page).found
    assert [attributes.get("id") for tag, attributes, _ in elements if tag == "script"] == ["data", None]
    assert not [tag for tag, *_ in elements if tag in ("img", "iframe", "object", "link", "base")]
    assert not [name for _, attributes, _ in elements for name in attributes if name.startswith("on")]
    assert HOSTILE not in page
    assert "<img" not in page
    assert {HOSTILE, f"{HOSTILE}.inner", WORSE} <= set(_names(_data(page)["tree"]))
    assert any(HOSTILE in text for _, text in _elements(page, "td"))


def test_policy_allows_the_one_script_and_the_one_style_sheet(page):
    policy = next(a["content"] for a, _ in _elements(page, "meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(text) == 1
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_page_needs_nothing_else(page):
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    attributes = {name for _, found, _ in _Elements(page).found for name in found}
    assert not attributes & {"src", "srcset", "action", "style"}
    assert {found["href"][0] for _, found, _ in _Elements(page).found if "href" in found} == {"#"}
    ((_, style),) = _elements(page, "style")
    assert not re.search(r"url\(|@import", style)


def test_same_plan_same_bytes(page):
    assert _render(compilation.__wrapped__()) == page


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def path(tmp_path, page):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def outlined(tmp_path_factory):
    """A page with what the command line and notebooks say on top."""
    found = compilation(2, 4, schedule="gpipe", memory_weight=0.0)
    options = PipelineOptions(2, 4, schedule="gpipe", memory_weight=0.0)
    path = tmp_path_factory.mktemp("outlined") / "report.html"
    path.write_text(render_page(found, outlook(options, found.planned)), encoding="utf-8")
    return path


def test_page_says_what_to_change_and_how_fast_it_is(outlined):
    found = compilation(2, 4, schedule="gpipe", memory_weight=0.0)
    said = outlook(PipelineOptions(2, 4, schedule="gpipe", memory_weight=0.0), found.planned)
    page = outlined.read_text(encoding="utf-8")
    assert [text for _, text in _elements(page, "li")] == list(said.advice)
    assert said.advice
    cards = dict(re.findall(r'<span class="what">(.*?)</span><b>(.*?)</b>', page))
    assert cards["MFU"] == f"{said.parts.mfu:.1%}"
    assert cards["Samples per second"] == format_number(said.parts.rate)
    assert cards["Step"] == format_time(said.parts.total)
    assert f"of {format_bytes(said.limit)}" in page


def test_page_has_the_program_of_every_rank(page):
    found = compilation()
    shown = re.findall(r'id="program-(\d)"><summary>.*?</summary><pre tabindex="0">(.*?)</pre>', page, re.DOTALL)
    assert [(int(rank), html.unescape(text)) for rank, text in shown] == [(r, found.rank_source(r)) for r in range(3)]
    links = {text: attributes["href"] for attributes, text in _elements(page, "a")}
    assert links == {str(stage.index): f"#program-{stage.rank}" for stage in found.plan.stages}


def test_page_of_many_ranks_names_the_files_of_their_programs(monkeypatch):
    monkeypatch.setattr("smpc.report.page._MOST_PROGRAMS", 2)
    page = _render(compilation())
    assert "rank_0.py to rank_2.py, beside this file" in page
    assert [text for _, text in _elements(page, "pre")] == []


def _pixel(tab, canvas, x, y):
    context = f"document.getElementById('{canvas}').getContext('2d')"
    return tab.evaluate(f"[...{context}.getImageData({x}, {y}, 1, 1).data]")[:3]


def test_browser_and_picture_have_the_same_colours(tab, path):
    image = pytest.importorskip("matplotlib.image")
    picture = image.imread(io.BytesIO(render_plot(compilation().plan, compilation().timeline())))[..., :3]
    tab.open(path)
    _, _, width = _place(tab, "timeline")
    for rank in range(3):
        first, last = tab.evaluate(
            f"(e => [(e[0][3] + e[0][4]) / 2, (e.at(-1)[3] + e.at(-1)[4]) / 2])"
            f"(JSON.parse(document.getElementById('data').textContent).events[{rank}])"
        )
        for seconds in (first, last):  # a forward, a backward
            x = 64 + seconds / compilation().timeline().makespan * (width - 64)
            colour = _pixel(tab, "timeline", round(x), 22 + 34 * rank + 7)
            distance = abs(picture * 255 - colour).max(axis=-1)
            assert (distance <= 2).sum() > 500, (rank, colour)


def test_browser_draws_messages_where_the_reader_wants_them(tab, path):
    tab.open(path)
    drawn = "document.getElementById('timeline').toDataURL()"
    with_messages = tab.evaluate(drawn)
    tab.evaluate("document.getElementById('messages').click()")
    tab.settle()
    without = tab.evaluate(drawn)
    assert with_messages != without
    tab.evaluate("document.getElementById('messages').click()")
    tab.settle()
    assert tab.evaluate(drawn) == with_messages


def test_browser_opens_the_program_of_a_stage(tab, path):
    tab.open(path)
    opened = "[...document.querySelectorAll('details.program')].map(e => e.open)"
    assert tab.evaluate(opened) == [False] * 3
    tab.evaluate("document.querySelectorAll('a.stage')[1].click()")
    tab.settle()
    assert tab.evaluate(opened) == [False, True, False]
    assert tab.evaluate("document.getElementById('program-1').getBoundingClientRect().top") < 1000
    assert tab.errors == []


def _is_blank(tab, canvas):
    script = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.every(v => v === 0))"
    return tab.evaluate(f"{script}(document.getElementById('{canvas}'))")


@pytest.mark.slow
def test_everybody_can_read_it_on_small_and_large_screens(tab, path):
    """axe-core finds nothing to complain of, and only the page's own boxes are wider than the window."""
    checks = axe()
    for width in (400, 1400):
        for scheme in ("light", "dark"):
            tab.open(path, scheme, width=width)
            tab.evaluate(f"{checks};0")
            found = tab.evaluate(
                "axe.run(document, {resultTypes: ['violations']})"
                ".then(r => r.violations.map(v => [v.id, v.nodes.length, v.nodes[0].html]))"
            )
            assert found == [], f"{width} px, {scheme}"
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{width} px"
            assert (tab.errors, tab.dialogs) == ([], [])


def test_browser_draws_it_without_complaint_in_light_and_dark(tab, path):
    backgrounds = []
    for scheme in ("light", "dark"):
        tab.open(path, scheme)
        assert (tab.errors, tab.dialogs) == ([], [])
        assert {url.partition(":")[0] for url in tab.requests} == {"file"}
        assert len(tab.requests) == 1
        assert not _is_blank(tab, "timeline")
        assert not _is_blank(tab, "memory")
        backgrounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]


def test_browser_shows_hostile_names_as_text(tab, path):
    tab.open(path)
    tab.evaluate("document.querySelector('[data-tree=open]').click()")
    shown = tab.evaluate("[...document.querySelectorAll('#tree .name > span:last-child')].map(e => e.textContent)")
    assert {HOSTILE, WORSE, "(the whole model)"} <= set(shown)
    assert tab.evaluate("document.title") == "Net: 3 stages on 3 ranks, 4 microbatches"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert (tab.errors, tab.dialogs) == ([], [])


def _place(tab, canvas):
    return tab.evaluate(f"(b => [b.left, b.top, b.width])(document.getElementById('{canvas}').getBoundingClientRect())")


def _tip(tab):
    return tab.evaluate("[...document.querySelectorAll('#tip:not([hidden]) > *')].map(e => e.innerText)")


def test_browser_tells_what_is_under_the_pointer(tab, path):
    tab.open(path)
    left, top, width = _place(tab, "timeline")
    tab.mouse("mouseMoved", left + 66, top + 22 + 15)  # the first forward of rank 0
    tip = _tip(tab)
    assert tip[0] == "Forward"
    cells = dict(line.split("\n") for line in tip[1:])
    assert (cells["rank"], cells["stage"], cells["microbatch"], cells["start"]) == ("0", "0", "0", "0 us")
    assert {"end", "takes", "memory"} <= set(cells)
    tab.mouse("mouseMoved", left + width - 2, top + 22 + 15)  # its last backward
    assert _tip(tab)[0] == "Backward"
    tab.mouse("mouseMoved", left + 66, top + 22 + 2 * 34 + 15)  # the last rank has nothing to do yet
    assert _tip(tab)[0] == "rank 2, idle"
    left, top, width = _place(tab, "memory")
    tab.mouse("mouseMoved", left + width / 2, top + 60)
    assert _tip(tab)[0].startswith("rank 0, ")
    tab.mouse("mouseMoved", 5, 5)
    assert _tip(tab) == []


def test_browser_zooms_and_comes_back(tab, path):
    tab.open(path)
    left, top, width = _place(tab, "timeline")

    def start():
        tab.mouse("mouseMoved", left + 66, top + 22 + 15)
        return _tip(tab)

    before = start()
    tab.mouse("mouseWheel", left + width - 2, top + 30, deltaX=0, deltaY=-400, modifiers=2)  # with Ctrl
    assert start() != before
    tab.evaluate("document.querySelector('[data-zoom=fit]').click()")
    tab.settle()
    assert start() == before
    tab.mouse("mouseWheel", left + width / 2, top + 30, deltaX=0, deltaY=-400)  # the page scrolls
    assert start() == before


@pytest.mark.parametrize("arguments", [(12, 64), (2, 4, "interleaved", "zb-v")], ids=["many ranks", "zb-v"])
def test_browser_opens_a_page_of(tab, tmp_path, arguments):
    found = compilation(*arguments[:3], schedule=arguments[3] if len(arguments) > 3 else None)
    path = tmp_path / "report.html"
    path.write_text(_render(found), encoding="utf-8")
    tab.open(path)
    assert tab.errors == []
    assert not _is_blank(tab, "timeline")
    legend = tab.evaluate("[...document.querySelectorAll('#legend-time > span')].map(e => e.textContent)")
    assert legend == ["forward", "backward", *(["rest of a backward"] if len(arguments) > 3 else []), "idle"]


def _flat(node):
    return [node, *(below for child in node.children for below in _flat(child))]


def _tree():
    found = compilation()
    return module_tree(found.trace, found.plan)


def test_every_module_that_is_called_is_there_once():
    with torch.device("meta"):
        called = [name for name, module in Net().named_modules() if not isinstance(module, torch.nn.ModuleList)]
    nodes = _flat(_tree())
    assert sorted(node.name for node in nodes) == sorted(called)
    by_name = {node.name: node for node in nodes}
    assert by_name["blocks.1"].class_name == "Block"
    assert by_name[f"{WORSE}.inner"].class_name == "Linear"


def test_parameters_are_those_of_the_module_tied_ones_once():
    with torch.device("meta"):
        modules = dict(Net().named_modules())
    for node in _flat(_tree()):
        assert node.num_parameters == sum(p.numel() for p in modules[node.name].parameters())
    assert _tree().num_parameters == NUM_PARAMETERS


def test_flops_add_up_over_calls():
    by_name = {node.name: node for node in _flat(_tree())}
    one = 2 * 256 * WIDTH * 2 * WIDTH  # a product of 2 x 128 tokens
    assert by_name["blocks.1.inner"].forward_flops == one
    assert by_name["blocks.1"].forward_flops == 2 * one
    assert by_name["blocks.0"].forward_flops == 4 * one  # called twice
    assert by_name["head"].forward_flops == by_name["embedding"].forward_flops == one / 2
    assert by_name[""].forward_flops == 2 * 7 * one + one
    assert by_name[""].forward_flops == sum(stage.forward_flops for stage in compilation().plan.stages)


def test_stages_are_those_of_the_plan():
    by_name = {node.name: node for node in _flat(_tree())}
    assert by_name[""].stages == (0, 1, 2)
    for stage in compilation().plan.stages:
        for module in stage.modules:
            assert stage.index in by_name[module].stages
    assert any(len(by_name[name].stages) == 1 for name in (HOSTILE, "blocks.3"))
