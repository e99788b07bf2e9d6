"""FedOMG: gradient alignment of the clients' updates on the server (Nguyen et al. 2025), all of it in aligned.py.

It has nothing of its own against forgetting: it is what STAMP does between clients, and Table 2's ablation (1).
"""

from fclmodels.methods.aligned import Aligned


class FedOMG(Aligned):
    """FedAvg whose server looks for a direction that no client's update points against."""

    name = "fedomg"
    paper = "Federated Domain Generalization with Data-free On-server Gradient Matching"
