"""RegMean, federated: a merged layer is the least-squares solution, all else is FedAvg's mean."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.regmean import RegMean


def make_round(
    method: Any, client_of: Callable, folder: Any, clients: int
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The server's weights after a round, and each client's own."""
    server = method.start_task(method.create_server(), 0)
    payload, replies, own = method.make_payload(server), Replies(list(range(clients)), folder), []
    for index in range(clients):
        training = method.prepare_training(client_of(method, index), payload)
        training.run()
        own.append({name: tensor.clone() for name, tensor in training.network.state_dict().items()})
        replies.add(index, method.exchanges[TRAIN].reply(client_of(method, index), payload)[0])
    return method.aggregate(server, replies).weights, own


def test_a_merged_layer_is_the_least_squares_solution_and_biases_are_means(
    method_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Of the first layer, whose inputs are the images: on all clients' rows nearest to each client's own outputs."""
    method = method_of(RegMean, share=1.0)
    after, own = make_round(method, client_of, tmp_path, 3)
    X = []
    for index in range(3):
        (batch,) = method.run.batches.iterate_ordered(method.select_rows(0, index), 1000)
        X.append(batch.inputs.flatten(1).double().numpy())
    rows = np.concatenate(X)
    outputs = np.concatenate([x @ w["backbone.fc1.weight"].double().numpy().T for x, w in zip(X, own, strict=True)])
    right = np.linalg.lstsq(rows, outputs, rcond=1e-6)[0].T
    np.testing.assert_allclose(rows @ after["backbone.fc1.weight"].double().numpy().T, rows @ right.T, atol=1e-4)
    plain, _ = make_round(method_of(FedAvg), client_of, tmp_path / "plain", 3)
    assert torch.equal(after["backbone.fc1.bias"], plain["backbone.fc1.bias"])
    assert not torch.allclose(after["backbone.fc1.weight"], plain["backbone.fc1.weight"], atol=1e-5)


@pytest.mark.parametrize("widest", [4096, 1])
def test_a_client_alone_gets_back_its_convolutions(
    widest: int, method_of: Callable, client_of: Callable, splits_of: Callable, tmp_path: Any
) -> None:
    method = method_of(RegMean, "model.backbone=cnn", splits=splits_of(shape=(1, 8, 8)), share=0.9, widest=widest)
    after, (own,) = make_round(method, client_of, tmp_path, 1)
    for name, tensor in after.items():  # but along directions that hardly a patch has
        torch.testing.assert_close(tensor, own[name], atol=1e-3, rtol=1e-3)
    shapes = {
        tensor.ndim for n, tensor in method.make_update_form(0, 0)["solved"].tensors.items() if n.startswith("gram")
    }
    assert shapes == ({1} if widest == 1 else {2})


def test_masks_change_nothing_where_inputs_span_less_than_all(
    method_of: Callable, client_of: Callable, mask: Callable, tmp_path: Any
) -> None:
    """Eight images a client, of 36 pixels; sums in fixed point have noise along directions that none of them has."""
    method = method_of(RegMean, share=1.0)
    server = method.start_task(method.create_server(), 0)
    replies = [method.exchanges[TRAIN].reply(client_of(method, i), method.make_payload(server))[0] for i in range(3)]
    plain, masked = Replies([0, 1, 2], tmp_path), Replies([0], tmp_path)
    for index, reply in enumerate(replies):
        plain.add(index, reply)
    masked.add(0, mask(replies))
    right, mine = (method.aggregate(server, of).weights for of in (plain, masked))
    for name, tensor in right.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-4, rtol=1e-3)


def test_what_it_cannot_do_is_refused(experiment_of: Callable) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=1")
    with pytest.raises(UserError, match=r"regmean divides by sums of inputs"):
        experiment_of(*private, method="regmean")
    with pytest.raises(UserError, match=r"federation\.server_lr: regmean .* Use 1"):
        experiment_of("federation.server_lr=0.5", method="regmean")
    with pytest.raises(UserError, match=r"federation\.server_lr: regmean .* server_lr_schedule: constant"):
        experiment_of("federation.server_lr_schedule=1/t", method="regmean")
