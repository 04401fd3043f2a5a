"""The quantizing ops in Triton. Importing this registers ``torch.ops.ltx_kernels.<op>_triton`` for each of them.

Arguments are checked and outputs allocated by ``<op>_outputs``, which is C++ and shared with the other backends; what
is here fills them. The contracts are those of the headers in csrc/blockwise.
"""

from ltx_kernels.blockwise.triton import (  # noqa: F401
    adanorm_quantize,
    dequantize,
    gated_attention,
    quantize,
    quantize_weights,
    rms_fma_quantize,
)
