"""The public data sets that torchvision knows: read where they lie, downloaded where the network allows.

Each keeps its official train and test samples. torchvision checks what it downloads against its checksums, and the
pickles of CIFAR each time before it opens them.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fclmodels.data.sources.base import Catalogue, Source, list_arrays
from fclmodels.data.sources.digits import DIGITS
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision
from fclmodels.settings.schema import ImageSettings


class TorchvisionSource(Source):
    """A data set whose class in torchvision is `dataset` and whose `files` can be put into root / `folder` by hand."""

    dataset: ClassVar[str]
    files: ClassVar[str]
    folder: ClassVar[str] = "."

    def catalogue(self) -> Catalogue:
        root = self.settings.root
        top = next((folder for folder in reversed(root.parents) if not folder.exists()), root)
        try:
            opened = {split: self.open(split) for split in ("train", "test")}
        # The remedy is the same for any cause: no network, a server's answer, a file cut short.
        except Exception as problem:
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[-1]
            folder = root / self.folder
            _drop_empty_folders(top)  # torchvision makes them before it looks for the files
            raise UserError(
                f"{self.name}: neither found nor downloaded ({reason}). Put {self.files} into {folder}."
            ) from problem
        parts: dict[str | None, Any] = {split: self.read_arrays(data) for split, data in opened.items()}
        return list_arrays(self.name, self.list_classes(opened["train"]), parts)

    def open(self, split: str) -> Any:
        """Open torchvision's data set of this official split."""
        return getattr(import_torchvision().datasets, self.dataset)(
            self.settings.root, download=True, **self.make_arguments(split)
        )

    def make_arguments(self, split: str) -> dict[str, Any]:
        """Return torchvision's arguments for an official split."""
        return {"train": split == "train"}

    def read_arrays(self, data: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return images [n, H, W] or [n, H, W, 3] and labels [n]."""
        return np.asarray(data.data), np.asarray(data.targets)

    def list_classes(self, data: Any) -> tuple[str, ...]:
        return tuple(data.classes)


def _drop_empty_folders(top: Path) -> None:
    for parent, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # the others are not empty
            os.rmdir(parent)


class Cifar10(TorchvisionSource):
    """CIFAR-10: 50,000 + 10,000 colour images of 32 px, 10 classes"""

    name = "cifar10"
    dataset = "CIFAR10"
    files = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"


class Cifar100(TorchvisionSource):
    """CIFAR-100: 50,000 + 10,000 colour images of 32 px, 100 classes"""

    name = "cifar100"
    dataset = "CIFAR100"
    files = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"


class FashionMnist(TorchvisionSource):
    """Fashion-MNIST: 60,000 + 10,000 grey articles of 28 px, 10 classes"""

    name = "fashion-mnist"
    dataset = "FashionMNIST"
    files = "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz of https://github.com/zalandoresearch/fashion-mnist"
    folder = "FashionMNIST/raw"


class DigitSource(TorchvisionSource):
    """A data set of the ten digits, named plainly: not every one has names, and MNIST's are "0 - zero"."""

    def list_classes(self, data: Any) -> tuple[str, ...]:
        return DIGITS


class Mnist(DigitSource):
    """MNIST: 60,000 + 10,000 grey handwritten digits of 28 px"""

    name = "mnist"
    dataset = "MNIST"
    files = "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz of https://ossci-datasets.s3.amazonaws.com/mnist"
    folder = "MNIST/raw"


class Usps(DigitSource):
    """USPS: 7,291 + 2,007 grey handwritten digits of 16 px"""

    name = "usps"
    dataset = "USPS"
    files = "usps.bz2 and usps.t.bz2 of https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"


class Svhn(DigitSource):
    """SVHN: 73,257 + 26,032 colour house numbers of 32 px, 10 classes"""

    name = "svhn"
    dataset = "SVHN"
    files = "train_32x32.mat and test_32x32.mat of http://ufldl.stanford.edu/housenumbers"

    def make_arguments(self, split: str) -> dict[str, Any]:
        return {"split": split}

    def read_arrays(self, data: Any) -> tuple[np.ndarray, np.ndarray]:
        return data.data.transpose(0, 2, 3, 1), data.labels


class Emnist(TorchvisionSource):
    """EMNIST: grey handwritten letters and digits of 28 px; `split` chooses which"""

    name = "emnist"
    dataset = "EMNIST"
    files = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    folder = "EMNIST/raw"

    class Settings(ImageSettings):
        split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = Field(
            "balanced", description="which of EMNIST's own selections of classes and samples"
        )

    settings: Settings

    def make_arguments(self, split: str) -> dict[str, Any]:
        return {"split": self.settings.split, "train": split == "train"}

    def read_arrays(self, data: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return upright images: EMNIST's files hold each with rows and columns exchanged."""
        return np.asarray(data.data).swapaxes(1, 2), np.asarray(data.targets) - self._first_label

    def list_classes(self, data: Any) -> tuple[str, ...]:
        return tuple(data.classes)[self._first_label :]

    @property
    def _first_label(self) -> int:
        """EMNIST numbers the letters from 1, and torchvision calls class 0 "N/A"."""
        return int(self.settings.split == "letters")
