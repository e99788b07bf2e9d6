"""Monitors observe while a method learns, and change nothing. watch.py has those that a run's settings switch on.

used_share: r / d of each protected layer after each task (FOT Table 3, Figure 7), and their mean (layer null).
accuracy, drift: after every so many rounds, and after a task's last one (progress.py).
client_models: accuracy of the clients' own models after a task's last round, local and global (STAMP Figure 1).
oracles/: gradients, conflicts and transfer, which read train rows of earlier tasks.
"""
