"""Makes the plugins of this folder known to every Python process that has it on its path, workers too."""

from pathlib import Path

import fclmodels.backbones
import fclmodels.methods

HERE = Path(__file__).parent
for package in (fclmodels.backbones, fclmodels.methods):
    folder = str(HERE / package.__name__.rpartition(".")[2])
    if folder not in package.__path__:
        package.__path__.append(folder)
