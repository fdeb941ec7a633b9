"""--plot: a picture where there is matplotlib, one clear error where there is none."""

import importlib.util
import sys

import pytest
from report_cases import compilation

from smpc.errors import ConfigError
from smpc.report.plot import render_plot, require_matplotlib


def test_picture_is_a_png_and_the_same_every_time():
    pytest.importorskip("matplotlib")
    found = compilation()
    picture = render_plot(found.plan, found.timeline())
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(picture[16:20], "big") == 11 * 150  # its width
    assert render_plot(found.plan, found.timeline()) == picture
    other = compilation(2)
    assert render_plot(other.plan, other.timeline()) != picture


def test_missing_matplotlib_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how Python marks what cannot be imported
    with pytest.raises(ConfigError) as error:
        require_matplotlib()
    assert "pip install 'smpc[plot]'" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_reports_without_pictures_need_no_matplotlib():
    assert importlib.util.find_spec("smpc.report.page") is not None
    assert "matplotlib" not in sys.modules["smpc.report.terminal"].__dict__
