"""The penalties on tokens that were seen before.

Formulas as in vLLM and the OpenAI API: the repetition penalty (Keskar et al., "CTRL", 2019) counts
prompt and output, the presence and frequency penalties count the output alone.
"""

import jax
import jax.numpy as jnp


def penalise(
    logits: jax.Array,
    in_prompt: jax.Array,
    output_counts: jax.Array,
    repetition: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
) -> jax.Array:
    """Penalised logits [S, V]; in_prompt and output_counts [S, V], the penalties [S].

    The neutral values 1, 0 and 0 leave a row's bits as they are.
    """
    in_output = output_counts > 0
    factor = jnp.where(in_prompt | in_output, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * output_counts.astype(jnp.float32)
    return logits - presence[:, None] * in_output.astype(jnp.float32)
