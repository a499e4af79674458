"""A model as a function of JAX, with derivatives of any order (the extra `jax`)."""

from refgrad.installing import install

try:
    import jax  # noqa: F401
except ImportError as error:
    raise ImportError(f"refgrad.jax needs JAX. Install it: {install('jax')}.", name="jax") from error

from refgrad.jax.function import Function, function

__all__ = ["Function", "function"]
