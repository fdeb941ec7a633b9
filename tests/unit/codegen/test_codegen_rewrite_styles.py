"""Plans of styles: what they say is done, and what is wrong with them is said, all of it, before anything else happens."""

import pytest
import torch
from torch import nn

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.styles import StylePlan, choose_by_plan
from smpc.compile import compile_model
from smpc.errors import CodegenError, ConfigError
from smpc.tracer.record import record


class Mlp(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": Mlp(inner)}) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer["mlp"](x)
        return x


def compiled(plan, inner=16):
    return compile_model(
        Model(inner), torch.ones(4, 8), pipeline_parallel_degree=1, tensor_parallel_degree=2, tensor_parallel_plan=plan
    ).sharded


def test_styles_by_name_pattern_are_the_layouts():
    found = dict(compiled({"layers.*.mlp.up_proj": "colwise", "layers.1.mlp.down_proj": "rowwise"}).layouts)
    assert found == {
        "layers.0.mlp.up_proj.weight": Layout.sharded(0),
        "layers.0.mlp.up_proj.bias": Layout.sharded(0),
        "layers.1.mlp.up_proj.weight": Layout.sharded(0),
        "layers.1.mlp.up_proj.bias": Layout.sharded(0),
        "layers.1.mlp.down_proj.weight": Layout.sharded(1),
    }


@pytest.mark.parametrize(
    ("plan", "messages"),
    [
        (
            {"layers.*.mlp.gate": "colwise", "up_proj": "diagonal"},
            ["'layers.*.mlp.gate': expected the name", "'up_proj': expected a style of"],
        ),
        ({"layers.*.mlp.gate": "colwise"}, ["found none that fits; the model has layers.0.mlp.up_proj.weight, "]),
        ({"up_proj": None}, ["'up_proj': expected a style of colwise, ", "found None"]),
        ("best", ["expected 'auto', 'off', 'huggingface' or styles by name pattern, found 'best'"]),
        (
            {"up_proj": "colwise", "layers.0.mlp.down_proj": "rowwise"},
            [
                "layers.0.mlp.up_proj.weight, colwise: expected dimension 0 divisible by 2 ranks, found 5; ",
                "layers.1.mlp.up_proj.bias, colwise: expected dimension 0 divisible by 2 ranks, found 5; ",
                "layers.0.mlp.down_proj.weight, rowwise: expected dimension 1 divisible by 2 ranks, found 5; ",
            ],
        ),
    ],
)
def test_plans_that_cannot_be(plan, messages):
    with pytest.raises(ConfigError) as caught:
        compiled(plan, inner=5)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


@pytest.mark.parametrize("styles", [None, (("up_proj", "colwise"), ("down_proj", "rowwise"))])
def test_modules_that_are_to_stay_whole_do_whatever_else_is_said(styles):
    """Experts that ranks divide: of blocks that are alike, too."""
    trace = record(Model(16), (torch.ones(4, 8),))
    choice = choose_by_plan(trace, 2, StylePlan(styles, whole=("layers.1.mlp",)))
    divided = {name for name, layout in choice.by_parameter if layout.kind is LayoutKind.SHARDED}
    assert "layers.0.mlp.up_proj.weight" in divided
    assert not any(name.startswith("layers.1.mlp.") for name in divided)


def test_a_program_that_cannot_compute_with_the_slices_of_the_first_one():
    """It was told to relax a plan, where there was none."""

    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x):
            return x @ torch.linalg.matrix_exp(self.weight)

    trace = record(Powers(), (torch.ones(2, 4),), {})
    (layout,) = dict(choose_by_plan(trace, 2, StylePlan()).by_parameter).values()
    assert layout == REPLICATED
    with pytest.raises(
        CodegenError, match=r"The program of the first step has decided .* let the first step be one of this kind"
    ):
        choose_by_plan(trace, 2, StylePlan(layouts=(("weight", Layout.sharded(0)),)))
