"""Checks for anyone's tests of their own plugins; each raises AssertionError with a line that says what is wrong."""

from fclmodels.testing.backbone_checks import check_backbone
from fclmodels.testing.data_checks import check_partition, check_source, check_stream, make_samples
from fclmodels.testing.method_trial import MethodTrial, check_method, train

__all__ = [
    "MethodTrial",
    "check_backbone",
    "check_method",
    "check_partition",
    "check_source",
    "check_stream",
    "make_samples",
    "train",
]
