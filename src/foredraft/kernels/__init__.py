"""CPU kernels for verification: what k+1 rows cost, and that their bits do not depend on k.

:class:`PackedLinear` multiplies with packed weights (float32, bfloat16, 8, 6 and 4 bits). Where the compiled library is
missing, torch does the same sums (:func:`available`, :func:`why_unavailable`).
"""

from foredraft.kernels.library import available, isa_name, why_unavailable
from foredraft.kernels.linear import Activations, Matrix, PackedLinear
from foredraft.kernels.race import race, uniforms

__all__ = ["Activations", "Matrix", "PackedLinear", "available", "isa_name", "race", "uniforms", "why_unavailable"]
