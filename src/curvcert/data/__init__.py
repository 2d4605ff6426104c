"""Data to train and to certify on: the embedded digits and a network for them, MNIST, CIFAR-10, and batches of them."""

from curvcert.data.augmentation import Augmentation, ColourJitter
from curvcert.data.cifar10 import load_cifar10
from curvcert.data.datasets import load
from curvcert.data.demo_network import load_demo_network
from curvcert.data.device_loader import DeviceLoader, EpochPlan
from curvcert.data.digits import Digits, load_digits
from curvcert.data.download import DownloadFailed
from curvcert.data.labelled import LabelledImages
from curvcert.data.mnist import load_mnist
from curvcert.data.mnist_sample import load_mnist_network, load_mnist_sample
from curvcert.data.official import data_folder

__all__ = [
    "Augmentation",
    "ColourJitter",
    "DeviceLoader",
    "Digits",
    "DownloadFailed",
    "EpochPlan",
    "LabelledImages",
    "data_folder",
    "load",
    "load_cifar10",
    "load_demo_network",
    "load_digits",
    "load_mnist",
    "load_mnist_network",
    "load_mnist_sample",
]
