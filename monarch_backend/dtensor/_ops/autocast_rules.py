"""Autocast rules by kind of device: the operators that autocast handles, and the dtype of each.

They follow torch's documentation for GPUs, and torch_xla 2.9. _patches/semantics/autocast.py applies them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules of one kind of device: operators in the lower precision, and those in the widest dtype of their arguments.

    All other operators that autocast handles run in float32.
    """

    lower: frozenset[str]
    widest: frozenset[str]
    refused: frozenset[str] = frozenset()
    """Operators that overflow in any lower precision."""


CUDA = Rules(
    lower=frozenset(
        {
            "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
            "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm",
            "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
            "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
            "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
            "scaled_dot_product_attention",
        }
    ),
    widest=frozenset(
        {
            "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
            "scatter_add", "tensordot",
        }
    ),
    refused=frozenset({"binary_cross_entropy"}),
)  # fmt: skip
"""Rules of GPUs. torch itself reports further operators."""

XLA = Rules(
    lower=frozenset(
        {
            "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d", "einsum", "linear", "matmul", "max_pool2d", "mm", "prelu", "relu",
        }
    ),
    widest=frozenset({"cat", "index_copy", "stack"}),
)  # fmt: skip
XLA_OPERATORS = (
    "_softmax", "addbmm", "addmm", "baddbmm", "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "bmm", "cat", "cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "conv1d", "conv1d.padding", "conv2d",
    "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "cosine_embedding_loss", "cross_entropy_loss", "ctc_loss.IntList", "ctc_loss.Tensor",
    "einsum", "hinge_embedding_loss", "index_copy", "inverse", "kl_div", "l1_loss",
    "linalg_inv_ex", "linalg_svd", "linear", "log_softmax.int", "margin_ranking_loss", "matmul",
    "max_pool2d", "mm", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward",
    "nll_loss", "nll_loss2d", "pow.Tensor_Scalar", "prelu", "prod", "prod.dim_int", "qr",
    "reflection_pad1d", "reflection_pad2d", "relu", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "smooth_l1_loss", "soft_margin_loss", "softmax.int", "stack", "svd", "trace",
    "triangular_solve", "triplet_margin_loss",
)  # fmt: skip
"""All operators that torch_xla handles, without those of named dimensions. The controller has no torch_xla to query."""
