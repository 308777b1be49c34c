"""Objects reachable from an object: the tensors and arrays that it keeps alive."""

import gc
import types

import numpy as np
import torch

_ATOMS = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float)


def reachable(root):
    """Every object reachable from ``root``, except classes and modules."""
    seen, pending = {}, [root]
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, _ATOMS):
            continue
        seen[id(found)] = found
        if isinstance(found, types.FunctionType):  # not its globals
            pending += [*(found.__closure__ or ()), found.__defaults__, found.__dict__]
        elif isinstance(found, np.ndarray):
            pending.append(found.base)
        elif not isinstance(found, torch.Tensor):
            pending += gc.get_referents(found)
    return list(seen.values())


def tensors_of(root):
    """Every tensor that ``root`` keeps alive, and every numpy array as a tensor."""
    found = reachable(root)
    arrays = [x for x in found if isinstance(x, np.ndarray) and x.dtype.kind in "iuf"]
    tensors = [x for x in found if isinstance(x, torch.Tensor)]
    return tensors + [torch.from_numpy(array) for array in arrays if array.flags.writeable]
