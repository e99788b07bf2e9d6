"""Monitors observe while a method learns, and change nothing. watch.py has those that a run's settings switch on.

used_share: r / d of each protected layer after each task (FOT Table 3, Figure 7), and their mean (layer null).
accuracy, drift: after every so many rounds, and after a task's last one (progress.py).
gradients: the share of gradients that the method lets through, before every so many rounds (gradients.py), and the loss
increase of old tasks beside FedProTIP's Theorem 2 (theorem2.py).
conflicts: cosines between gradients of clients and of tasks, before every so many rounds (conflicts.py).
"""
