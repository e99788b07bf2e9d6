"""PIP-DualP: prototype injection with the prompts of Fed-DualP (PIP, Algorithm 1).

FedAvg on a frozen backbone (parts/frozen_backbone.py) that trains prompts (parts/prompt_training.py), whose heads also
learn from classes' Gaussians (parts/prototype_injection.py), and whose server may fit the head to them after a task
(parts/refitted_head.py, ours).

`profile: paper` is Algorithm 1: all of a task's classes join a batch (eq. 9) as mu + beta sigma (eq. 11), and clients
count by their rounds in all tasks (eq. 12 to 15).

`profile: release` is the public code: a pool of 10 that a batch chooses from, prompts as keys and values, experts that
start anew in each round, heads averaged at a task's end, three vectors a class, prototypes from the second round on.
Its errors, in the variance and in which prompts become keys and which values, are not copied.
"""

from typing import ClassVar

from fclmodels.methods.fed_dualp import PROFILES, FedDualP
from fclmodels.methods.parts.injected_prompts import InjectedPrompts
from fclmodels.methods.parts.prototype_injection import INJECTION_PROFILES
from fclmodels.settings.base import Profiles


class PipDualP(InjectedPrompts):
    """Fed-DualP whose heads also learn from prototypes of classes that a client lacks."""

    name = "pip-dualp"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"
    attaches = FedDualP.attaches

    class Settings(FedDualP.Settings, InjectedPrompts.Settings):  # defaults of the first go before those of the second
        profiles: ClassVar[Profiles] = {name: {**PROFILES[name], **INJECTION_PROFILES[name]} for name in PROFILES}

    settings: Settings
