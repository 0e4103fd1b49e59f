"""The exceptions. Each is also the Python kind that callers already catch.

A message names the argument, what it was and what it must be. It is raised before anything is written.
"""

from __future__ import annotations


class OmniGemmError(Exception):
    """The base of every error this library raises on purpose."""


class ShapeError(OmniGemmError, ValueError):
    """A tensor has the wrong shape, or two shapes do not fit together."""


class DTypeError(OmniGemmError, TypeError):
    """A tensor has an element type that the operation does not take, or a number does not fit its type."""


class LayoutError(OmniGemmError, ValueError):
    """A tensor's strides or memory cannot be used: it overlaps itself or another operand, or has none."""


class DeviceError(OmniGemmError, RuntimeError):
    """Tensors are on different devices, or on one that cannot be used."""


class WorkspaceError(OmniGemmError, ValueError):
    """A workspace is too small or has the wrong type."""


class UnsupportedError(OmniGemmError, NotImplementedError):
    """No backend, or not the one asked for, can run this problem. The message gives each one's reason."""


class CompileError(OmniGemmError, RuntimeError):
    """A kernel could not be compiled or loaded."""


class SettingsError(OmniGemmError, ValueError):
    """A setting, or a variable of the environment, has a value that it cannot have."""
