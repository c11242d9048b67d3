"""The HTML of objects in notebooks, whose text is escaped."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from lieattn._core.messages import titled_table
from lieattn.geometry import Radius, lift, point_clouds
from lieattn.groups import cyclic, tetrahedral
from lieattn.models import Ensemble, FramewiseTransformer, Rescaled


class Cells(HTMLParser):
    """Records the text of the cells of a page, and checks that every tag is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open += [] if tag in ("meta", "rect", "line", "circle") else [tag]
        self.cells += [""] if tag in ("td", "th") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def network():
    return FramewiseTransformer(tetrahedral(), 1, 2, channels=4, layers=2)


def test_text_is_escaped():
    page = titled_table("<script>alert(1)</script>", [("<b>", "a & b")], ("<i>", "second"))
    assert "<script>" not in page
    assert Cells(page).cells == ["<i>", "second", "<b>", "a & b"]


def test_models_have_a_row_for_each_part():
    model = network()
    page = model._repr_html_()
    cells = Cells(page).cells
    assert cells[:3] == ["part", "class", "parameters"]
    assert "2 x FramewiseBlock" in cells
    assert f"FramewiseTransformer: {sum(weight.numel() for weight in model.parameters()):,} parameters" in page
    assert "R^3 x| T" in page
    printed = str(model).splitlines()
    assert len(cells) == 3 * len(printed)
    for model in (Ensemble([network(), network()]), Rescaled(network(), {"y": 2.0})):
        assert "FramewiseTransformer" in model._repr_html_() or "networks" in model._repr_html_()


def test_names_of_parts_are_escaped():
    model = network()
    model.add_module("<img src=x>", nn.Linear(1, 1))
    page = model._repr_html_()
    assert "<img" not in page
    assert "<img src=x>" in Cells(page).cells


@pytest.mark.parametrize("lifted", [False, True], ids=["clouds", "graph"])
def test_clouds_and_graphs_have_their_numbers(lifted):
    pos = torch.randn(7, 2)
    shown = lift(pos, cyclic(4), Radius(1.0)) if lifted else point_clouds(pos)
    cells = Cells(shown._repr_html_()).cells
    pairs = dict(zip(cells[::2], cells[1::2], strict=True))
    assert (pairs["points"], pairs["dim"], pairs["dtype"]) == ("7", "2", "float32")
    assert pairs.get("fiber") == ("4" if lifted else None)
    for name, value in pairs.items():
        assert f"{name}={value}" in repr(shown)
