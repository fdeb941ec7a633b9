"""What changed between two plans: nothing goes unnamed, and modules are followed."""

import dataclasses

import pytest
from report_cases import compilation

from smpc.partitioner.graph.plan import Edge, HostLink, Plan, SharedParameter, Stage
from smpc.report.compare import MODULES, Change, compare


@pytest.fixture(scope="module")
def plan():
    return compilation().plan


def _other(value):
    """A value of the same type that differs."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, float):
        return value * 1.000001 + 1e-9
    if isinstance(value, int):
        return value + 1
    if value is None:  # what it is offloaded over
        return HostLink(32e9, 1e-5, True)
    assert isinstance(value, tuple), value
    return (*value, "another")


def _with(plan, field, value):
    return dataclasses.replace(plan, **{field: value})


def _mutants(plan):
    """The plan with each of its values changed alone."""
    for field in dataclasses.fields(Plan):
        value = getattr(plan, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                changed = dataclasses.replace(value, **{inner.name: _other(getattr(value, inner.name))})
                yield f"{field.name}.{inner.name}", _with(plan, field.name, changed)
        elif field.name == "assignment":
            yield field.name, _with(plan, field.name, ((value[0][0], value[0][1] + 1), *value[1:]))
        elif field.name == "shared_parameters":
            yield field.name, _with(plan, field.name, (*value, SharedParameter("more", (0, 1))))
        elif field.name not in ("stages", "edges"):
            yield field.name, _with(plan, field.name, _other(value))
    for name, cls in (("stages", Stage), ("edges", Edge)):
        items = getattr(plan, name)
        yield name, _with(plan, name, items[:-1])
        for inner in dataclasses.fields(cls):
            changed = dataclasses.replace(items[-1], **{inner.name: _other(getattr(items[-1], inner.name))})
            yield f"{name}.{inner.name}", _with(plan, name, (*items[:-1], changed))


def test_equal_plans_have_no_changes(plan):
    assert compare(plan, Plan.from_json(plan.to_json())) == ()


def test_every_single_change_is_named_and_its_values_differ(plan):
    mutants = list(_mutants(plan))
    assert len(mutants) > 45
    for name, mutant in mutants:
        for pair in ((plan, mutant), (mutant, plan)):
            changes = compare(*pair)
            assert changes, name
            assert all(change.before != change.after or change.amount for change in changes), (name, changes)


@pytest.mark.parametrize("changed", [{"rate": 33e9}, {"latency": 2e-5}, {"overlaps": False}], ids=str)
def test_links_to_the_host_are_compared_by_what_they_are(plan, changed):
    link = HostLink(32e9, 1e-5, True)
    one, other = (dataclasses.replace(plan, host_link=found) for found in (link, dataclasses.replace(link, **changed)))
    (change,) = compare(one, other)
    assert (change.where, change.what) == ("host_link", *changed)
    assert change.before != change.after


def test_modules_are_followed(plan):
    stages = tuple(
        dataclasses.replace(stage, modules=modules)
        for stage, modules in zip(plan.stages, [("a", "h.0", "h.1"), ("h.2.x", "h.3"), ("h.2.y", "z")], strict=True)
    )
    moved = tuple(
        dataclasses.replace(stage, modules=modules)
        for stage, modules in zip(plan.stages, [("a", "h.0"), ("h.1", "h.2"), ("h.3", "z")], strict=True)
    )
    changes = compare(dataclasses.replace(plan, stages=stages), dataclasses.replace(plan, stages=moved))
    assert [change for change in changes if change.where == MODULES] == [
        Change(MODULES, "h.1", "stage 0", "stage 1"),
        Change(MODULES, "h.3", "stage 1", "stage 2"),
        Change(MODULES, "h.2.y", "stage 2", "stage 1"),
    ]


def test_amounts_are_relative_and_fractions_are_in_points(plan):
    schedule = dataclasses.replace(
        plan.schedule, num_microbatches=6, bubble_fraction=plan.schedule.bubble_fraction + 0.1
    )
    changes = compare(plan, dataclasses.replace(plan, schedule=schedule))
    assert [(change.where, change.what, change.amount) for change in changes] == [
        ("schedule", "num_microbatches", "+50.0%"),
        ("schedule", "bubble_fraction", "+10.00 points"),
    ]
