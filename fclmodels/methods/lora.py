"""LoRA on the frozen transformer: low-rank steps of W_Q and W_V, and the head (Hu et al. 2021, section 4.1)."""

from fclmodels.backbones.model.prompt_adapters import LoraVit
from fclmodels.methods.linear_probe import LinearProbe


class Lora(LinearProbe):
    """Trains low-rank changes of a frozen transformer's attention, and the head."""

    name = "lora"
    paper = "LoRA: Low-Rank Adaptation of Large Language Models"
    attaches = LoraVit

    class Settings(LinearProbe.Settings, LoraVit.Settings):
        pass
