"""Names of layers whose inputs are captured: a module's, or that of one group of a grouped convolution."""


def name_group(module: str, group: int) -> str:
    """Return the name of the layer that is a group of a module."""
    return f"{module}[{group}]"


def find_module_name(layer: str) -> str:
    """Return the name of a layer's module: the layer's without the group."""
    return layer.partition("[")[0]
