"""CODA-Prompt, federated: each task adds components of prompts to a pool, keys and attention (Smith et al., CVPR 2023).

The mathematics is in fclmodels/backbones/adapters/coda_prompts.py. Clients train the present task's components and the
head by cross entropy, the server averages them; earlier components take part and stay as they are. Left out is CODA's
loss of orthogonality, whose weight is 0 in its release: components start orthogonal. 100 components of ten tasks, of
length 8 in the layers 0 to 4, are its release's.
"""

from torch import Tensor

from fclmodels.backbones.adapters.coda_prompts import CodaVit
from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.task_adapters import AdapterTraining


class CodaPrompt(AdapterTraining):
    """Averages components of prompts, a few for each task, and the head of a frozen transformer."""

    name = "coda-prompt"
    paper = "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning"
    attaches = CodaVit

    class Settings(CodaVit.Settings):
        pass

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, task = training.network, training.client.task
        features = self.network.compute_features(network, batch, task).features
        return self.compute_cross_entropy(network, features, batch.labels, task)
