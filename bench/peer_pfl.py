"""FedAvg by Apple's pfl, round by round; started by torchrun (peers.py)."""

import torch
from peer_work import WORK, wait
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class LossModule(nn.Module):
    """The network with its loss, as pfl asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = WORK.network()

    def compute_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict:
        return {}


class RoundGate(TrainingProcessCallback):
    """Callback that lets all processes begin a round together, when the measuring process says so."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.wait()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.wait()
        return False, Metrics()

    def wait(self) -> None:
        if torch.distributed.get_rank() == 0:
            wait()
        torch.distributed.barrier()


def main() -> None:
    torch.set_num_threads(1)
    clients = WORK.facts["clients"]
    data = {str(client): WORK.data(client) for client in range(clients)}
    users = FederatedDataset(
        lambda user: Dataset(data[user], user_id=user), get_user_sampler("minimize_reuse", list(data))
    )
    module = LossModule()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    backend = SimulatedBackend(users, users, [WeightByDatapoints()])
    trained = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=WORK.facts["optimizer"]["lr"], local_batch_size=WORK.facts["batch"]
    )
    rounds = NNAlgorithmParams(
        central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=None
    )
    FederatedAveraging().run(rounds, backend, model, trained, None, [RoundGate()], send_metrics_to_platform=False)


if __name__ == "__main__":
    main()
