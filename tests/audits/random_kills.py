"""Run by test_random_kills.py as a process of its own: an audit that is killed again and again, and one that is not.

torch is loaded once: every try is a fork of this process, which itself computes nothing and has one thread.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from holdfast.audits import audit
from holdfast.audits.task import work

THREATS = ("linf:0.15", "l2:0.4")
OPTIONS = {
    "budget": "quick",
    "budgets": 3,
    "batch_size": 4,
    "attack": "pgd",
    "attack_options": {"steps": 5, "loss": "margin"},
    "certify": "crown",
    "progress": False,
}
PAUSE = 0.01  # seconds before each piece of work, so that a kill also lands between two of them
TRIES = 80  # a try that comes to its end before the kill does not count


def case():
    """The same model and data wherever it is called: inputs break at every budget, and some hold."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    x = torch.rand(40, 1, 3, 4, generator=generator)
    y = model(x).argmax(1)
    y[::9] = (y[::9] + 1) % 3
    return model, (x, y)


def run(folder):
    """The audit, with a line in FOLDER.log for each batch that is begun or stored, and for each file written."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words):
        os.write(log, (" ".join(map(str, words)) + "\n").encode())  # one call: a kill leaves no half of a line

    def engine(model, tasks):
        for task in tasks:
            words = task.stage, task.method, task.threat, task.index.tolist()
            note("begin", *words)
            time.sleep(PAUSE)
            yield task, work(model, task)
            note("stored", *words)  # whoever asks for the next one has stored this one

    def replace(source, target):
        if Path(target).name != "progress.json":  # written by the clock
            note("begin file", Path(target).name)
            time.sleep(PAUSE)
        rename(source, target)

    rename, os.replace = os.replace, replace
    model, data = case()
    audit(model, data, [hf.threat(text) for text in THREATS], out=folder, engine=engine, **OPTIONS)


def fork(folder):
    """Process id of a new process that runs the audit; its exit code is 0 if it comes to the end."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def begun(folder, what="begin"):
    """How many different pieces of work were begun."""
    path = Path(f"{folder}.log")
    lines = path.read_text().splitlines() if path.exists() else []
    return len({line for line in lines if line.startswith(what)})


def ended(pid, *, wait=False):
    """Exit code of the process, negative if it was killed; None if it is running."""
    found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_when(pid, folder, goal, chance):
    """Kills the process once it has begun `goal` pieces of work and a little later; its exit code."""
    late = begun(folder) >= goal  # that far already: anywhere from the first import to the next piece of work
    while begun(folder) < goal:
        if (code := ended(pid)) is not None:
            return code
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.3 if late else 2 * PAUSE))
    if (code := ended(pid)) is not None:
        return code
    os.kill(pid, signal.SIGKILL)
    return ended(pid, wait=True)


def main(folder, seed, kills):
    torch.set_num_threads(1)
    whole, killed = folder / "whole", folder / "killed"
    codes = [ended(fork(whole), wait=True)]
    total, files, chance = begun(whole), begun(whole, "begin file"), random.Random(seed)
    # Most of them anywhere in the work, some where files are written, which takes less time.
    few = kills // 4
    goals = sorted(chance.choices(range(total), k=kills - few) + chance.choices(range(total - files, total), k=few))
    while goals and len(codes) < TRIES:
        codes.append(kill_when(fork(killed), killed, goals[0], chance))
        if codes[-1] == -signal.SIGKILL:
            goals.pop(0)
    codes.append(ended(fork(killed), wait=True))
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
