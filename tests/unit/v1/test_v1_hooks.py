"""What waits for the cut of a model and for the end of a step, without a model."""

from types import SimpleNamespace

import pytest

from smpc.errors import UsageError
from smpc.v1.session.process_state import Script
from smpc.v1.steps.model_hooks import ModelHooks


def make():
    log, script = [], Script()
    script.optimizer = SimpleNamespace(prepare=lambda: log.append("optimizer"), tell_others=lambda: log.append("told"))
    return ModelHooks("model", script), script, log


def test_loads_come_first_then_hooks_each_in_their_order():
    hooks, script, log = make()
    hooks.register_post_partition(lambda *given: log.append(("first", *given)))
    hooks.defer(lambda: log.append("load"), has_masters=False)
    hooks.defer(lambda: log.append("later load"), has_masters=False)
    removed = hooks.register_post_partition(lambda *given: log.append("removed"))
    hooks.register_post_partition(lambda *given: log.append("second"))
    removed.remove()
    hooks.run()
    assert log == ["optimizer", "load", "later load", "told", ("first", "model", script.optimizer), "second"]


def test_what_a_load_will_fill_is_not_read_before():
    hooks, script, _ = make()
    script.check_filled("optimizer.state_dict")
    hooks.defer(lambda: None, has_masters=False)
    with pytest.raises(
        UsageError, match="save_checkpoint: the state of the optimizer that was loaded is filled in by the first step"
    ):
        script.check_filled("save_checkpoint")
    hooks.register_post_partition(lambda *given: script.check_filled("optimizer.state_dict"))
    hooks.run()


def test_a_hook_that_comes_after_the_cut_runs_at_once_and_a_load_once():
    hooks, script, log = make()
    hooks.defer(lambda: log.append("load"), has_masters=False)
    hooks.run()
    script.optimizer = None
    hooks.register_post_partition(lambda *given: log.append(given))
    assert log == ["optimizer", "load", "told", ("model", None)]
    assert hooks.early == []


def test_after_the_first_step_the_optimizer_of_now_is_given():
    hooks, script, log = make()
    hooks.register_post_step(lambda *given: log.append("removed")).remove()
    hooks.register_post_step(lambda *given: log.append(given))
    script.optimizer = None
    assert not hooks.have_stepped
    hooks.after_step()
    assert hooks.have_stepped
    assert log == [("model", None)]


def test_a_hook_that_comes_after_the_first_step_runs_at_once():
    hooks, script, log = make()
    hooks.after_step()
    hooks.register_post_step(lambda *given: log.append(given))
    assert log == [("model", script.optimizer)]
