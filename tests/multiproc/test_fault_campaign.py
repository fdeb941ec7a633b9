"""Random faults: every process is gone in time, the right rank is named, and nothing is left behind."""

import dataclasses
import json
import multiprocessing.connection
import os
import random
import shutil
import socket
import tempfile
import time
from pathlib import Path

import fault_script
import forked_launch
import pytest
import server
from fault_script import (
    AFTER,
    BEFORE,
    BETWEEN,
    BUILD,
    COLLECTIVE,
    ENDS,
    EXIT,
    INIT,
    KILL,
    LEAVE,
    LOOP,
    MICROBATCHES,
    MODEL,
    NATIVE,
    NUM_STEPS,
    RAISE,
    RECORD,
    SEGV,
    SLEEP,
    STALLS,
    START,
    STOP,
    WIRE,
    Fault,
)

from smpc.launch.job import Job

LIMIT = 10.0
START_LIMIT = 18.0  # ranks come to the start at different times, and look for those that have ended now and then
STEP_TIMEOUT = 6.0
START_TIMEOUT = 8.0
SEED = int(os.environ.get("SMPC_FAULT_SEED", "0"))
NUM_FAULTS = int(os.environ.get("SMPC_NUM_FAULTS", "200"))
NUM_DRIVERS = int(os.environ.get("SMPC_FAULT_DRIVERS", "2"))  # at a time
PROGRESS = 10  # faults between two lines
STATUS = {KILL: 137, SEGV: 139}
# What the others know of a rank before its first step.
PHASES = {
    INIT: "in smp.init",
    AFTER: "after smp.init, before smp.DistributedModel",
    BUILD: "after smp.init, before smp.DistributedModel",
    MODEL: "in smp.DistributedModel",
    RECORD: "recording the model",
    BETWEEN: "after smp.DistributedModel, before its first step",
}


def draw(generator):
    world, degree = generator.choice([(2, 2), (2, 2), (4, 4), (4, 2)])
    return draw_start(generator, world, degree) if generator.random() < 0.4 else draw_step(generator, world, degree)


def draw_with_experts(generator):
    """The same where ranks have other experts each, mostly of pipelines."""
    world, degree, experts = generator.choice([(4, 2, 2), (4, 2, 2), (2, 1, 2), (4, 1, 2)])
    while True:
        kind = draw_start if generator.random() < 0.25 else draw_step
        fault = dataclasses.replace(kind(generator, world, degree), experts=experts)
        if degree > 1 or (fault.action != WIRE and fault.place != RECORD):  # there is no other stage, and no recording
            return fault


def draw_start(generator, world, degree):
    """A fault before the first step."""
    action = generator.choice([RAISE, RAISE, KILL, SEGV, EXIT, LEAVE, SLEEP, LOOP, STOP, NATIVE, COLLECTIVE])
    place = generator.choice(START if action != COLLECTIVE else [AFTER, BUILD])
    start_timeout = START_TIMEOUT if action in STALLS else 100.0
    return Fault(action, place, world, degree, generator.randrange(world), 0, 0, 100.0, start_timeout=start_timeout)


def draw_step(generator, world, degree):
    action = generator.choice([RAISE, RAISE, RAISE, KILL, KILL, SEGV, SLEEP, SLEEP, WIRE, *STALLS[1:]])
    places = {
        RAISE: ["forward", "backward", "loss", "optimizer", "data"],
        KILL: ["forward", "backward", "loss", "optimizer", "data"],
        SEGV: ["forward", "backward", "data"],
        SLEEP: ["forward", "backward", "loss", "optimizer", "data"],
    }.get(action, ["forward"])
    place = generator.choice(places)
    rank = generator.randrange(world)
    if place == "loss":
        rank = rank // degree * degree + degree - 1
    if action == WIRE and degree > 1 and rank % degree == degree - 1:
        rank -= 1  # the last stage sends nothing on
    first = 1 if action in STALLS else 0  # the first step compiles, and has the start's timeout
    last = NUM_STEPS - 1 if place != "optimizer" else NUM_STEPS - 2  # after it a step, in which the others wait
    step, microbatch = generator.randint(first, last), generator.randrange(MICROBATCHES)
    timeout = STEP_TIMEOUT if action in STALLS else 100.0
    return Fault(action, place, world, degree, rank, step, microbatch, timeout)


def drive(faults, folder):
    """Run faults one after another, in a process that has imported torch; one line of JSON for each."""
    with open(folder / "results.jsonl", "w") as results:
        for number, text in enumerate(faults):
            fault = Fault.read(text)
            case = folder / str(number)
            temporary = case / "tmp"
            temporary.mkdir(parents=True)
            os.environ["TMPDIR"] = str(temporary)
            tempfile.tempdir = None
            moment = case / "moment"
            armed = Fault(**{**json.loads(text), "moment": str(moment)})
            job = Job(fault_script.__file__, (armed.to_json(),), fault.world)
            status, shown, port, pids, ended = forked_launch.run(job, case)
            found = {
                "status": status,
                "shown": shown,
                "took": ended - float(moment.read_text()) if moment.exists() else None,
                "logs": [(case / f"{rank}.log").read_text() for rank in range(fault.world)],
                "left": leftovers(port, pids, temporary),
            }
            results.write(json.dumps(found) + "\n")
            results.flush()
            shutil.rmtree(case)


def leftovers(port, pids, temporary):
    found = [
        str(path) for path in temporary.rglob("*") if "torchinductor" not in path.name
    ]  # torch's cache of compiled code
    for pid in pids:
        found += [str(path) for path in Path("/dev/shm").glob(f"*{pid}*")] if Path("/dev/shm").exists() else []
        try:
            os.killpg(pid, 0)
            found.append(f"process group {pid}")
        except ProcessLookupError:
            pass
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            found.append(f"port {port}")
    return found


def complaints(fault, found):
    """What is not as it should be."""
    wrong = []
    shown, logs, rank = found["shown"], found["logs"], fault.rank
    others = [log for other, log in enumerate(logs) if other != rank]
    if found["took"] is None:
        return [f"the fault did not happen: {shown}"]
    if fault.place in START:
        return complaints_of_start(fault, found)
    limit = LIMIT + (fault.step_timeout if fault.action in STALLS else 0.0)
    if found["took"] > limit:
        wrong.append(f"took {found['took']:.1f} s")
    if found["left"]:
        wrong.append(f"left behind {found['left']}")
    if found["status"] != STATUS.get(fault.action, 1):
        wrong.append(f"status {found['status']}")
    if fault.action in STATUS:
        signal = "9 (SIGKILL)" if fault.action == KILL else "11 (SIGSEGV)"
        expected = [f"smpc: error: rank {rank} was killed by signal {signal}"]
    elif fault.action in STALLS:
        expected = [f"smpc: error: rank {rank} stalled"]
        wrong += [
            f"rank {other} does not say who" for other, log in enumerate(others) if f"rank {rank} stalled" not in log
        ]
    else:
        expected = [f"smpc: error: rank {rank} failed, which ended the other ranks"]
        expected += ["ArithmeticError: bomb"] if fault.action == RAISE else ["TransportError: edge ", "module"]
    if fault.in_step and fault.action in (RAISE, SLEEP) and fault.degree > 1:  # one stage has no instructions
        expected += [f"microbatch {fault.microbatch}", "stage "]
    if fault.action == SLEEP:
        expected += ["time.sleep(1000)"]
    wrong += [f"the launcher does not say {text!r}" for text in expected if text not in shown]
    return wrong


def complaints_of_start(fault, found):
    """The same of a fault before the first step."""
    shown, rank, action = found["shown"], fault.rank, fault.action
    others = [log for other, log in enumerate(found["logs"]) if other != rank]
    limit = START_LIMIT + (fault.start_timeout if action in STALLS else 0.0)
    wrong = [f"took {found['took']:.1f} s"] if found["took"] > limit else []
    wrong += [f"left behind {found['left']}"] if found["left"] else []
    wrong += [f"status {found['status']}"] if found["status"] != STATUS.get(action, 1) else []
    expected = [f"rank {rank}"]
    if action in STATUS:
        expected = [
            f"smpc: error: rank {rank} was killed by signal {'9 (SIGKILL)' if action == KILL else '11 (SIGSEGV)'}"
        ]
    elif action == RAISE:
        whole = f"smpc: error: rank {rank} failed, which ended the other ranks"
        expected = ["ArithmeticError: bomb", *([whole] if fault.place != RECORD else [])]
    elif action in STALLS:
        expected = [f"rank {rank} did not come" if fault.place == BEFORE else f"smpc: error: rank {rank} stalled"]
    if action in STALLS and fault.place != BEFORE:
        expected.append(PHASES[fault.place])
    if action in (*STALLS, *ENDS) and fault.place != BEFORE:
        wrong += [f"a rank does not say who: {log!r}" for log in others if f"rank {rank}" not in log + shown]
    return wrong + [f"the launcher does not say {text!r}" for text in expected if text not in shown]


def lines_of(folder, number):
    """What a driver has written so far."""
    results = folder / f"driver{number}" / "results.jsonl"
    return (
        [line for line in results.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if results.exists()
        else []
    )


def run_campaign(faults, folder, num_drivers):
    context = server.context()
    drivers = []
    for number in range(num_drivers):
        own = folder / f"driver{number}"
        own.mkdir()
        arguments = ([fault.to_json() for fault in faults[number::num_drivers]], own)
        drivers.append(context.Process(target=drive, args=arguments))
        drivers[-1].start()
    limit = time.monotonic() + 60.0 + 60.0 * len(faults) / num_drivers
    shown = 0
    while any(driver.is_alive() for driver in drivers) and time.monotonic() < limit:
        multiprocessing.connection.wait([driver.sentinel for driver in drivers if driver.is_alive()], timeout=1.0)
        done = sum(len(lines_of(folder, number)) for number in range(num_drivers))
        if done // PROGRESS > shown // PROGRESS:
            shown = done
            print(f"{done} of {len(faults)} faults", flush=True)
    for driver in drivers:
        if driver.is_alive():
            driver.kill()
        driver.join()
    wrong, times = [], []
    for number in range(num_drivers):
        mine = faults[number::num_drivers]
        lines = lines_of(folder, number)
        for fault, line in zip(mine, lines, strict=False):
            found = json.loads(line)
            bad = complaints(fault, found)
            times.append((found["took"] or 0.0) - allowed(fault))
            if bad:
                wrong.append("\n".join([str(fault), *bad, found["shown"], *found["logs"]]))
        wrong += [f"never ran: {fault}" for fault in mine[len(lines) :]]
    print(
        f"seed {SEED}: {len(faults)} faults, {len(wrong)} wrong; slowest end {max(times, default=0.0):.1f} s after it was due"
    )
    return wrong


def allowed(fault):
    """Seconds that nothing moves before the fault is told."""
    if fault.action not in STALLS:
        return 0.0
    return fault.start_timeout if fault.place in START else fault.step_timeout


@pytest.mark.long
def test_a_few_faults_before_the_first_step(tmp_path):
    """Ranks waited seven days for one that stopped, or left, between smp.init and its model, or before its first step."""
    faults = [
        Fault(action, place, 2, 2, 1, 0, 0, 100.0, start_timeout=3.0 if action in STALLS else 100.0)
        for action, place in (
            (STOP, AFTER),
            (SLEEP, MODEL),
            (LEAVE, BUILD),
            (NATIVE, BETWEEN),
        )
    ]
    wrong = run_campaign(faults, tmp_path, 2)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.long
def test_a_few_faults(tmp_path):
    generator = random.Random(SEED)
    kinds = {RAISE: "backward", KILL: "forward", SLEEP: "loss", WIRE: "forward"}
    faults = []
    for action, place in kinds.items():
        faults.append(
            next(
                fault for fault in iter(lambda: draw(generator), None) if (fault.action, fault.place) == (action, place)
            )
        )
    wrong = run_campaign(faults, tmp_path, 2)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.long
def test_a_few_faults_of_ranks_with_experts(tmp_path):
    """Those with other experts wait for the rank's tokens, not for its gradients."""
    faults = [
        Fault(KILL, "forward", 2, 1, 1, 1, 2, 100.0, experts=2),
        Fault(SLEEP, "backward", 2, 1, 0, 1, 1, STEP_TIMEOUT, experts=2),
        Fault(RAISE, "forward", 4, 2, 2, 1, 1, 100.0, experts=2),
    ]
    wrong = run_campaign(faults, tmp_path, 2)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("drawn", [draw, draw_with_experts])
def test_campaign(tmp_path, capfd, drawn):
    generator = random.Random(SEED)
    with capfd.disabled():  # it takes an hour: show how far it is
        wrong = run_campaign([drawn(generator) for _ in range(NUM_FAULTS)], tmp_path, NUM_DRIVERS)
    assert not wrong, f"{len(wrong)} of {NUM_FAULTS}, seed {SEED}:\n\n" + "\n\n".join(wrong)
