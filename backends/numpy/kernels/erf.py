"""erf and erfc in NumPy, to about one unit in the last place of a double.

The rational approximations of FreeBSD's msun, s_erf.c (Copyright 1993 Sun Microsystems, Inc., freely granted for use,
copy and distribution provided that this notice is preserved), evaluated on each of their four intervals at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ERX = 8.45062911510467529297e-01  # erf(1) rounded to single precision
# Numerators and denominators, ascending powers. PP/QQ: |x| < 0.84375; PA/QA: up to 1.25; RA/SA: up to 1/0.35; RB/SB.
_PP = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
_QQ = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
_PA = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
_QA = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
_RA = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
_SA = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
_RB = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
_SB = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)


def erf(x: np.ndarray) -> np.ndarray:
    """Error function; any float dtype, computed in double."""
    return _both(x, complement=False)


def erfc(x: np.ndarray) -> np.ndarray:
    """1 − erf(x) without cancellation for large x; any float dtype, computed in double."""
    return _both(x, complement=True)


def _both(x: np.ndarray, complement: bool) -> np.ndarray:
    flat = np.asarray(x, np.float64).reshape(-1)
    size = np.abs(flat)
    result = np.full_like(flat, np.nan)
    near, middle, far = size < 0.84375, (size >= 0.84375) & (size < 1.25), size >= 1.25
    if near.any():
        z = flat[near]
        value = z + z * _ratio(z * z, _PP, _QQ)
        result[near] = 1 - value if complement else value
    if middle.any():
        value = _ERX + _ratio(size[middle] - 1, _PA, _QA)
        tail = 1 - _ERX - _ratio(size[middle] - 1, _PA, _QA)
        result[middle] = _signed(flat[middle], value, tail, complement)
    if far.any():
        tail = _far_tail(size[far])
        result[far] = _signed(flat[far], 1 - tail, tail, complement)
    return result.reshape(np.shape(x)).astype(x.dtype, copy=False)


def _signed(x: np.ndarray, value: np.ndarray, tail: np.ndarray, complement: bool) -> np.ndarray:
    """Erf or erfc at `x` from erf = `value` and erfc = `tail` at |x|."""
    if complement:
        return np.where(x > 0, tail, 1 + value)
    return np.asarray(np.copysign(value, x))


def _far_tail(size: np.ndarray) -> np.ndarray:
    """Erfc for arguments from 1.25 on: exp(−z² − 9/16)·exp((z − x)(z + x) + R/S)/x, with z = x cut to 32 bits."""
    bounded = np.minimum(size, 30)
    s = 1 / (bounded * bounded)
    correction = np.where(bounded < 1 / 0.35, _ratio(s, _RA, _SA), _ratio(s, _RB, _SB))
    z = (bounded.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return np.asarray(np.exp(-z * z - 0.5625) * np.exp((z - bounded) * (z + bounded) + correction) / bounded)


def _ratio(x: np.ndarray, numerator: Sequence[float], denominator: Sequence[float]) -> np.ndarray:
    return np.asarray(_polynomial(x, numerator) / _polynomial(x, denominator))


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value *= x
        value += coefficient
    return value
