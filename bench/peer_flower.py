"""FedAvg by Flower's simulation on Ray, one CPU a client, round by round (peers.py)."""

import os

import peer_work
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_work import WORK, wait

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    trained = peer_work.network()
    trained.load_state_dict(message.content["arrays"].to_torch_state_dict())
    trained.train()
    inputs, labels = peer_work.data(int(context.node_config["partition-id"]))
    optimiser = torch.optim.SGD(trained.parameters(), WORK.facts["optimizer"]["lr"])
    for rows in torch.randperm(len(labels)).split(WORK.facts["batch"]):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs[rows]), labels[rows]).backward()
        optimiser.step()
    answer = {"arrays": ArrayRecord(trained.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(answer), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=WORK.facts["clients"])

    def turn(server_round: int, arrays: ArrayRecord) -> None:
        wait()

    strategy.start(grid, ArrayRecord(WORK.network().state_dict()), num_rounds=10**6, evaluate_fn=turn)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server_app, client_app, WORK.facts["clients"], backend_config=resources)
