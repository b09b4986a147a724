"""Trains in a process of its own, killing itself without warning at a chosen moment of step 2.

Usage: driver.py SETTINGS OUT MOMENT RESUME
"""

import os
import signal
import sys
from pathlib import Path

import torch

from envace.config import TrainSettings, load_settings
from envace.engines.local.sampler import LocalSampler
from envace.engines.local.trainer import Trainer
from envace.training.loop import train

settings, out, moment, resume = sys.argv[1:5]
passes = 0


def die_at(count: int) -> None:
    global passes
    passes += 1
    if passes == count:
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name: str, count: int) -> None:
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        die_at(count)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


if moment == "sampling":
    before(LocalSampler, "_decode", 12)  # a step of the toy takes more passes than that
    # Not in step 1: count from the first update on.
    original = Trainer.step

    def restart(self, *args, **kwargs):
        global passes
        passes = 0 if self.steps == 0 else -(10**9)
        return original(self, *args, **kwargs)

    passes = -(10**9)
    Trainer.step = restart
elif moment == "update":
    before(Trainer, "_backward", 10**9)
    step = Trainer.step

    def second(self, *args, **kwargs):
        global passes
        passes = 10**9 - 1 if self.steps == 1 else 0
        return step(self, *args, **kwargs)

    Trainer.step = second
elif moment == "checkpoint":
    before(torch, "save", 2)  # the optimizer's state of step 2: the model's files are written, the folder is partial

train(load_settings(TrainSettings, Path(settings)), Path(out), resume=resume == "resume")
