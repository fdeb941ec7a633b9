"""What waits for the cut of a model and for the end of a step, without a model."""

from types import SimpleNamespace

import pytest

from smpc.errors import UsageError
from smpc.v1.session.process_state import Script
from smpc.v1.steps.context import ModelHooks


def make():
    log, script = [], Script()
    script.optimizer = SimpleNamespace(
        load_deferred=lambda: log.append("optimizer"), tell_others=lambda: log.append("told")
    )
    return ModelHooks("model", script), script, log


def test_loads_come_first_then_the_optimizers_then_hooks_in_their_order():
    hooks, script, log = make()
    hooks.register_post_partition(lambda *given: log.append(("first", *given)))
    hooks.deferred.append(lambda: log.append("load"))
    removed = hooks.register_post_partition(lambda *given: log.append("removed"))
    hooks.register_post_partition(lambda *given: log.append("second"))
    removed.remove()
    hooks.run()
    assert log == ["load", "optimizer", "told", ("first", "model", script.optimizer), "second"]


def test_what_a_load_will_fill_is_not_read_before():
    hooks, script, _ = make()
    hooks.defer(lambda: None, "model")
    script.check_filled("optimizer.state_dict", "optimizer")
    with pytest.raises(
        UsageError, match="save_checkpoint: the state of the model that was loaded is filled in by the first step"
    ):
        script.check_filled("save_checkpoint", "model", "optimizer")
    hooks.register_post_partition(lambda *given: script.check_filled("model.state_dict", "model"))
    hooks.run()


def test_a_hook_that_comes_after_the_cut_runs_at_once_and_a_load_once():
    hooks, script, log = make()
    hooks.deferred.append(lambda: log.append("load"))
    hooks.run()
    script.optimizer = None
    hooks.register_post_partition(lambda *given: log.append(given))
    assert log == ["load", "optimizer", "told", ("model", None)]
    assert hooks.deferred == []


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
