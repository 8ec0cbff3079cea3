"""The decoder-only Transformer of all decoder families.

Legend: B batch, T tokens of a (packed) row, D model, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.checks import check_type
from jaxscale.keywords import explain_keywords
from jaxscale.models import decode_layers
from jaxscale.models.config import DecoderConfig
from jaxscale.models.pretrained import Pretrained, check_dtype, check_tokens
from jaxscale.models.serving import for_inference
from jaxscale.models.stack import (
    check_remat,
    look_up,
    lose,
    make_stack,
    run_stack,
)
from jaxscale.models.stack_layout import flat_stack
from jaxscale.models.vocabulary import real_logits, rows_in_context
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block, make_norm
from jaxscale.nn.context import state_of_part
from jaxscale.nn.embeddings import NORMAL_INIT, Embed, zero_behind
from jaxscale.nn.linear import Linear
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import (
    AttentionState,
    Packed,
    Whole,
    attention_state,
)
from jaxscale.sharding.decode_all_reduce import ReduceWorkspace
from jaxscale.sharding.fp8 import Fp8, check_fp8
from jaxscale.sharding.manual import manual_names
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.rules import REPLICATED, AxisRules, check_rules
from jaxscale.sharding.tensor_parallel import TensorParallel, check_tensor_parallel


_PRESET = "jaxscale.models.preset('llama_tiny') makes one"


class Decoder(Pretrained, nnx.Module):
    """Token embedding, a stack of identical blocks, a norm and an output projection.

    The parameters of the blocks are stacked along a leading ``layers`` axis. The module
    is a pytree: pass it to `jax.jit`, `jax.value_and_grad` and optax as it is.

    Example:
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[1, 2, 3, 4, 5]])
        >>> model(tokens).shape
        (1, 5, 256)

        Packed: the same tokens as two sequences of two and three tokens.

        >>> model(tokens, cu_seqlens=jnp.array([[0, 2, 5]])).shape
        (1, 5, 256)
    """

    adapters: Any = None
    """A `jaxscale.models.adapters.AdapterStack`, for inference."""
    decode_layer: str | None = "auto"
    """Implementation of `pallas_kernels.decode_layer.decode_layer` with which few
    requests decode, ``"mosaic_gpu"`` or ``"xla"``, where the layers allow it; None runs
    block by block. ``"auto"`` is the kernel up to 32 rows, where it is faster, over
    several GPUs on two H200s alone, where it needs a workspace in the state
    (`PagedRows.workspace`), as the engine makes it. By name the kernel also computes
    attention over pages where it can; long contexts have not been timed so. Set it on
    a model that `for_inference` returned.
    """

    @explain_keywords
    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        scan_layers: bool = True,
        rules: AxisRules = REPLICATED,
        tensor_parallel: TensorParallel = None,
        quantization: Fp8 = None,
        attention_implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the parameters; on a mesh, inside `jaxscale.sharding.create`.

        Args:
            config: Shape and variant.
            dtype: Type of activations and matmuls; norms, rotary angles, softmax and
                logits are always in fp32.
            param_dtype: Type of the parameters.
            remat: Activation checkpointing, a name of `REMAT_POLICIES`.
            scan_layers: Compile one block and scan over the stack.
            rules: The sharding rules.
            tensor_parallel: How to communicate if the rules split heads and hidden
                features: ``"fused"`` kernels, explicit ``"xla"`` collectives, or the
                compiler if None. Parameters and results are the same.
            quantization: fp8 matmuls in the linear layers of the blocks, with a scale
                per row (``"fp8"``), per block of 128 numbers (``"fp8_blockwise"``) or
                per tensor (``"fp8_tensorwise"``); the rest, and the parameters, keep
                their types. None computes them in `dtype`.
            attention_implementation: Name of an attention implementation: of
                `pallas_kernels.varlen_attention` with sequence packing, otherwise of
                `pallas_kernels.attention`; None picks one.
            rngs: Source of the keys.

        Raises:
            ValueError: `rules` is no table, `remat` is not the name of a policy,
                `quantization` is unknown, or `tensor_parallel` is unknown or the rules
                do not give it one mesh axis.
        """
        check_type("config", config, DecoderConfig, _PRESET)
        check_type("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs(0) is one")
        check_dtype("dtype", dtype)
        check_dtype("param_dtype", param_dtype)
        check_rules(rules)
        check_remat(remat)
        check_tensor_parallel(tensor_parallel, rules)
        check_fp8(quantization)
        self.config = config
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.remat = remat
        self.scan_layers = scan_layers
        self.rules = rules
        self.tensor_parallel = tensor_parallel
        self.quantization = quantization
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}

        def table(count: int, row_axis: str | None, rows: int | None = None) -> Embed:
            return Embed(
                count,
                config.d_model,
                rows=rows,
                row_axis=row_axis,
                rules=rules,
                rngs=rngs,
                **types,
            )

        rows = rows_in_context(config.vocab_size, rules)
        self.embed = table(config.vocab_size, "vocab", rows)
        learned = config.position == "learned"
        self.positions = table(config.max_seq_len, None) if learned else None

        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(
                config.block(),
                attention_implementation=attention_implementation,
                rules=rules,
                tensor_parallel=tensor_parallel,
                quantization=quantization,
                rngs=rngs,
                **types,
            )

        self.blocks = make_stack(make_block, config.num_layers, rngs)
        self.norm = make_norm(
            config.norm,
            config.d_model,
            config.norm_eps,
            rules=rules,
            rngs=rngs,
            **types,
        )
        head = None if config.tie_embeddings else self._make_lm_head(rows, rngs)
        self.lm_head: Linear | QuantizedLinear | None = head

    def for_inference(self, mesh: Mesh | None = None) -> "Decoder":
        """The model in the layout that serves fastest; it cannot be saved.

        The stack of blocks is split, projections of the same input are merged
        (`jaxscale.nn.JoinedLinear`), and kernels and tables are in the type of the
        computation, so that no step copies or converts a weight. Sparse layers stay as
        they are. Only tensor parallelism remains: parameters are replicated over
        data-parallel and FSDP devices. If there are more devices than key/value heads,
        the heads are repeated.

        Args:
            mesh: Target devices; by default the model's own mesh.

        Example:
            >>> from jaxscale.models.families.llama import llama_tiny
            >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
            >>> block = model.for_inference().blocks[0]
            >>> block.attention.joined.kernel.shape  # queries, keys and values
            (32, 64)
        """
        return for_inference(self, mesh)

    @explain_keywords
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, in fp32: `unembed` of what `hidden` returns.

        Args:
            tokens: Token ids.
            cu_seqlens: Boundaries of the sequences, with sequence packing.
            positions: Position of each token in its sequence; counted if None.

        Raises:
            ValueError: as `hidden`.
        """
        hidden = self.hidden(tokens, cu_seqlens=cu_seqlens, positions=positions)
        return self.unembed(hidden)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The activations after the last norm, which `unembed` turns into logits.

        Args:
            tokens: Token ids. Padding on the right needs no mask: no real token attends
                to it.
            cu_seqlens: Sequence packing: sequence `i` of row `b` is the tokens from
                ``cu_seqlens[b, i]`` to ``cu_seqlens[b, i + 1]``. Tokens past the last
                sequence are padding; their activations are undefined.
            positions: Position of each token in its sequence; by default counted from
                the start of the row or of the packed sequence.

        Raises:
            ValueError: `cu_seqlens` that are not traced do not fit the rows, or a row
                is longer than the table of learned positions.

        Traced token ids and positions outside of their tables cannot be refused: they
        turn the activations of their own sequence to NaN, and no others.
        """
        check_tokens(tokens, (2,))
        state = self.attention_state(tokens.shape, cu_seqlens, positions)
        return self.run(tokens, state)[0]

    def attention_state(
        self,
        shape: tuple[int, ...],
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Whole | Packed:
        """The attention state of unpacked or packed rows of this `shape`, (B, T).

        With context parallelism (the rule `context` is Manual), T are the tokens of
        this device, and `cu_seqlens` the boundaries of whole rows: see
        `jaxscale.nn.context`.

        Raises:
            ValueError: as `hidden`.
        """
        names = manual_names(self.rules.context)
        if positions is None and cu_seqlens is None:
            length = shape[1] * jax.lax.axis_size(names) if names else shape[1]
            self._check_length("tokens per row", length)
        make = state_of_part if names else attention_state
        return make(shape, cu_seqlens=cu_seqlens, positions=positions, rules=self.rules)

    def run[State: AttentionState](
        self, tokens: Int[Array, "B T"], state: State
    ) -> tuple[Float[Array, "B T D"], State]:
        """The activations after the last norm, with attention as `state` says.

        `hidden` calls it with the state of unpacked or packed rows, the inference
        engine with that of new tokens after a paged KV cache (`jaxscale.nn.PagedRows`).

        Args:
            tokens: Token ids.
            state: Positions, and where the keys and values of a sequence are.

        Returns:
            The activations, and the state with the keys and values of the tokens.

        Example:
            A prompt of three tokens, and the one that follows it, in one page:

            >>> from jaxscale.models.families.llama import llama_tiny
            >>> from jaxscale.nn import PagedRows, empty_pages
            >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
            >>> pages = empty_pages(
            ...     num_layers=2, num_pages=1, page_size=8, num_kv_heads=2, head_dim=8
            ... )
            >>> table, held = jnp.array([[0]]), jnp.array([0])
            >>> state = PagedRows.of(pages, table, held, held + 3, num_tokens=3)
            >>> hidden, state = model.run(jnp.array([[1, 2, 3]]), state)
            >>> token = model.unembed(hidden[:, -1:]).argmax(-1)
            >>> state = PagedRows.of(state.pages, table, held + 3, held + 1)
            >>> model.run(token, state)[0].shape
            (1, 1, 32)
        """
        x, lost = self.embedded(tokens, state)
        x, state = self.run_blocks(x, state)
        return lose(self.norm(x), lost, self.rules), state

    def embedded(
        self,
        tokens: Int[Array, "B T"],
        state: AttentionState,
        vocab_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"] | None]:
        """The input of the first block, and the tokens with undefined activations.

        Args:
            tokens: Token ids.
            state: Their positions.
            vocab_axes: Manual mesh axes over which the caller has split the rows of the
                table of tokens, outermost first.
        """
        lookups, axes = [(tokens, self.embed)], [vocab_axes]
        if self.positions is not None:
            lookups.append((state.positions, self.positions))
            axes.append(())
        x, lost = look_up(state, lookups, self.rules, axes)
        if self.config.scale_embeddings:
            # The factor is rounded, as in the original code.
            x = x * jnp.asarray(math.sqrt(self.config.d_model), x.dtype)
        return x, lost

    def run_blocks[State: AttentionState](
        self,
        x: Float[Array, "B T D"],
        state: State,
        *,
        blocks: Block | None = None,
        variants: Sequence[AttentionConfig] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B T D"], State]:
        """The residual stream after the last block, and the state.

        Args:
            x: The residual stream.
            state: The state of attention.
            blocks: A stack of some of the layers; None is all.
            variants: The attention of each layer of `blocks`.
            **options: Passed to `jaxscale.models.stack.run_stack`.
        """
        whole = blocks is None and not options
        options = {"scan": self.scan_layers} | options
        if blocks is None:
            blocks = flat_stack(self.blocks, self.config.num_layers)
        if variants is None:
            variants = [self.config.attention(i) for i in range(self.config.num_layers)]
        name = self.decode_layer if whole else None
        if name == "auto":
            name = decode_layers.faster(blocks, len(x))
        if name and decode_layers.runs(blocks, x, state, variants, name):
            # With attention in the launches long contexts have not been timed yet.
            attend = self.decode_layer != "auto"
            return decode_layers.run(blocks, x, state, variants, name, attend=attend)
        return run_stack(
            blocks,
            x,
            state,
            variants=variants,
            remat=self.remat,
            keep_gathered=self.tensor_parallel == "fused",
            **options,
        )

    def adds_in_layers(self, rows: int, begin: Callable[[], ReduceWorkspace]) -> bool:
        """Whether the kernel of `decode_layer` decodes so many rows on several devices.

        Args:
            rows: How many rows of one token there are.
            begin: Makes the workspace in which it adds over devices.
        """
        name = self.decode_layer
        if name == "auto":
            name = decode_layers.faster(self.blocks, rows)
        if name != "mosaic_gpu" or self.adapters is not None:
            return False
        variants = [self.config.attention(i) for i in range(self.config.num_layers)]
        answers = []

        def ask() -> None:
            x = jnp.zeros((rows, self.config.d_model), self.dtype)
            found = decode_layers.takes(self.blocks, x, variants, name, begin())
            answers.append(found)

        jax.eval_shape(ask)
        return answers[0]

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in fp32 of the activations that `hidden` returns."""
        axes = ("batch", None, "act_vocab")
        hidden = constrain(hidden, ("batch", None, "act_embed"), self.rules)
        if isinstance(self.lm_head, QuantizedLinear):
            logits = self.lm_head(hidden)
        else:
            kernel, bias = self.output_embedding()
            logits = contract(
                "btd,dv->btv",
                hidden,
                kernel.astype(self.dtype),
                ("embed", "vocab"),
                axes,
                self.rules,
                preferred_element_type=jnp.float32,
            )
            if bias is not None:
                logits += constrain(bias.astype(jnp.float32), axes[-1:], self.rules)
        if (cap := self.logit_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return real_logits(logits, self.vocab_size, self.rules)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits; tables may have more rows on a mesh."""
        return self.config.vocab_size

    @property
    def logit_softcap(self) -> float | None:
        """Bound of the logits, ``cap * tanh(logits / cap)``; None leaves them."""
        return self.config.logit_softcap

    def output_embedding(
        self,
    ) -> tuple[Float[Array, "D V"], Float[Array, "V"] | None]:
        """Kernel and bias of the output projection, before `logit_softcap`.

        Columns from `vocab_size` on are padding.

        Raises:
            ValueError: the model is quantized, so there is no kernel to train.
        """
        if isinstance(self.lm_head, QuantizedLinear):
            raise ValueError(
                "the output projection is quantized, for inference; train the model "
                "that `quantize` was given"
            )
        if self.lm_head is None:
            return self.embed.table[...].T, None
        bias = self.lm_head.bias
        return self.lm_head.kernel[...], None if bias is None else bias[...]

    def _make_lm_head(self, rows: int, rngs: nnx.Rngs) -> Linear:
        return Linear(
            self.config.d_model,
            rows,
            kernel_axes=("embed", "vocab"),
            out_axes=("batch", None, "act_vocab"),
            use_bias=self.config.lm_head_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=zero_behind(NORMAL_INIT, 1, self.config.vocab_size),
            rules=self.rules,
            rngs=rngs,
        )
