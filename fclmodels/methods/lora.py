"""LoRA on the frozen transformer: low-rank steps of W_Q and W_V, and the head (Hu et al. 2021, section 4.1)."""

from fclmodels.backbones.adapters import LoraOnVit
from fclmodels.methods.frozen import Frozen


class Lora(Frozen):
    """Trains low-rank changes of a frozen transformer's attention, and the head."""

    name = "lora"
    paper = "LoRA: Low-Rank Adaptation of Large Language Models"
    attaches = LoraOnVit

    class Settings(Frozen.Settings, LoraOnVit.Settings):
        pass

    settings: Settings
