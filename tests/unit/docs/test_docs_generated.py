"""Pages of the site that are made from the code: the table of keys, the reference, the gallery; and the notebooks."""

import dataclasses
import importlib
import re
import sys

import pytest
import torch
from locations import REPOSITORY
from public_names import MODULES

from smpc.compile.options import PipelineOptions
from smpc.config import KEYS
from smpc.config import Config as Script
from smpc.v2.session.config import SessionConfig as ScriptForV2

NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def site(monkeypatch):
    """Imports a module of docs/site by its name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "site"))
    names = ("configuration", "gallery", "reference")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def _rows(page):
    """The cells of a page's tables, without their heads."""
    lines = [line for line in page.split("\n") if line.startswith("| ") and not line.startswith(("| ---", "| key"))]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_table_has_every_key_with_its_default(site):
    rows = _rows(site("configuration").page())
    found = {(row[0].strip("`"), "v2" in row[1]): row for row in rows}
    options = [field.name for field in dataclasses.fields(PipelineOptions)]
    expected = {(name, False) for name in (*KEYS, *options)}
    assert set(found) == expected | {(field.name, True) for field in dataclasses.fields(ScriptForV2)}
    assert len(rows) == len(found), "each once"
    assert all(len(row) == 6 and row[5] for row in rows)
    config = Script()
    for name in ("step_timeout", "tensor_parallel_plan", "nan_policy"):
        assert f"`{getattr(config, name)}`" in found[name, False][3]
    assert found["microbatches", False][1] == "`smp.init`<br>`-m`, `--microbatches`<br>`smpc.partition`"


def test_the_reference_has_the_modules_that_users_import(site):
    reference = site("reference")
    pages = reference.pages()
    assert [path for _, path in reference.navigation()] == list(pages)
    for name in reference.MODULES:
        assert name.endswith(("lightning", "accelerate", "huggingface")) or importlib.import_module(name).__doc__
        assert f"::: {name}\n" in pages[f"api/{name}.md"]
    deep = re.compile(r"smpc\.(v2\..*|v1\.(model|nn\..*|patches.*|state_mod|utils)|nn\..*)")
    assert [name for name in MODULES if name not in reference.MODULES and not deep.fullmatch(name)] == []


@pytest.mark.long
def test_the_gallery_plans_a_model(site):
    gallery = site("gallery")
    assert len(gallery.ENTRIES) == 10
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 50}
    tiny = gallery.Entry("GPT 2", "GPT2LMHeadModel", "GPT2Config", sizes, {"input_ids": (8, 16), "labels": (8, 16)})
    files = gallery.pages([tiny])
    (row,) = (row for row in _rows(files["gallery.md"]) if row[0] == "GPT 2")
    parameters = sum(p.numel() for p in tiny.build()[0].parameters())
    assert row[1] == f"{parameters / 1e9:.2f} billion"
    for link in re.findall(r"\]\(([^)]*)\)", row[-1]):
        assert files[link], link
    assert tiny.build()[1]["input_ids"].dtype == torch.int64


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin", prepend=":")
    book = nbformat.read(path, 4)
    assert all(not cell.get("outputs") for cell in book.cells), "saved without outputs"
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.get("outputs") for cell in book.cells)


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["plan", "search", "train"]
