"""Monitors that read what no federation can: the train rows of all clients, of earlier tasks too.

gradients: the share of gradients that the method lets through, before every so many rounds (gradients.py), and the loss
increase of old tasks beside FedProTIP's Theorem 2 (theorem2.py).
conflicts: cosines between gradients of clients and of tasks. transfer: alignment with earlier tasks, and their loss
beside SPECIAL's Theorem 4.7.
"""
