"""What people get wrong around the pass of a GPT-2: its start, its cache, its random windows."""

from __future__ import annotations

from parity_tests.planted import PlantedBug
from parity_tests.planted.gpt2_bugs import GPT2_NUMBERS, NUMPY_GPT2, TORCH_GPT2
from parity_tests.planted.table import CORPUS, EXACT, HAND, TRAINING, TWIN

FOLLOWING, NEXT = "GPT2Attention.following", "GPT2.predict_next"
RANDOM = f"{CORPUS}:CharDataset.random_batch"

# fmt: off
GPT2_RUNS: tuple[PlantedBug, ...] = (
    # --- Initial weights and their names
    PlantedBug(
        "gpt2-init-residual-scale-missing", f"{NUMPY_GPT2}:GPT2.__init__",
        "STD / math.sqrt(2 * blocks)", "STD",
        "what a block adds starts at the deviation of all other weights",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "gpt2-init-residual-scale-of-blocks", f"{TORCH_GPT2}:GPT2.__init__",
        "math.sqrt(2 * blocks)", "math.sqrt(blocks)",
        "each block counts as one addition to the residual stream, not two",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "gpt2-init-projection-by-fan-in", f"{NUMPY_GPT2}:GPT2Attention.__init__",
        "3 * embedding_size, rng, dtype, STD)", "3 * embedding_size, rng, dtype)",
        "the projection starts at sqrt(2 / in), as in the other model",
        frozenset({TWIN, HAND}),
    ),
    PlantedBug(
        "gpt2-init-table-stored-twice", f"{TORCH_GPT2}:GPT2.__init__",
        "self.norm = LayerNorm(embedding_size, dtype)",
        "self.norm = LayerNorm(embedding_size, dtype)\n"
        "    self.output = nn.Parameter(self.embedding.embedding.weight.detach().clone())",
        "the output's weight is a parameter of its own",
        frozenset({TWIN, HAND}),
    ),
    # --- Keys and values of earlier tokens
    PlantedBug(
        "gpt2-cache-past-behind", f"{NUMPY_GPT2}:{FOLLOWING}",
        "(past, present), axis", "(present, past), axis",
        "new keys and values stand before the earlier ones (no matter to the logits)",
        frozenset({TWIN, EXACT}),
    ),
    PlantedBug(
        "gpt2-cache-values-behind", f"{TORCH_GPT2}:{FOLLOWING}",
        "present = torch.cat((past, present), dim=-2)",
        "present = torch.stack((torch.cat((past[0], k), -2), torch.cat((v, past[1]), -2)))",
        "new values stand before the earlier ones, new keys after them",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-not-masked", f"{NUMPY_GPT2}:{FOLLOWING}",
        "scores if past is not None else self.mask(scores)", "scores",
        "without a past nothing is masked, so that a prompt's tokens see later ones",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-always-masked", f"{TORCH_GPT2}:{FOLLOWING}",
        "scores if past is not None else self.mask(scores)", "self.mask(scores)",
        "one query is masked as the first row of a square, and sees the first key alone",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-position-early", f"{NUMPY_GPT2}:{NEXT}",
        "self.embedding(tokens[:, start:], start)",
        "self.embedding(tokens[:, start:], max(0, start - 1))",
        "with a past, the new token has the position of the one before it",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-position-first", f"{TORCH_GPT2}:{NEXT}",
        "self.embedding(tokens[:, start:], start)", "self.embedding(tokens[:, start:])",
        "with a past, the new token has the first position",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-of-first-block", f"{TORCH_GPT2}:{NEXT}",
        "past if start else", "[past[0]] * len(past) if start else",
        "all blocks take the keys and values of the first",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-first-logits", f"{TORCH_GPT2}:{NEXT}", "x[:, -1:]", "x[:, :1]",
        "the logits after the first token, not after the last",
        frozenset({TWIN, EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-cache-in-leaking-model", f"{NUMPY_GPT2}:{NEXT}",
        "0 if self.allow_leak else length - 1", "length - 1",
        "where earlier rows see the new token, their keys and values are taken as they were",
        frozenset({TWIN, EXACT}),
    ),
    PlantedBug(
        "gpt2-cache-slides-with-window", f"{TRAINING}:stream",
        "window, past = window[1:], None",
        "window, past = window[1:], [x[..., 1:, :] for x in past]",
        "what is known of earlier tokens is kept when the window slides and all positions change",
        frozenset({EXACT, HAND}),
    ),
    # --- Random windows
    PlantedBug(
        "gpt2-windows-targets-not-shifted", RANDOM, "ids[places + 1]", "ids[places]",
        "the targets of a random window are its tokens",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-windows-last-start-lost", RANDOM,
        "len(ids) - self.context_size,", "len(ids) - self.context_size - 1,",
        "no random window reaches the end of its part",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-windows-seed-ignored", RANDOM,
        'require_integer("seed", seed, 0),', 'require_integer("seed", seed, 0) * 0,',
        "every seed draws the same windows",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-windows-step-ignored", RANDOM,
        'require_integer("step", step, 0)]', 'require_integer("step", step, 0) * 0]',
        "every step draws the same windows",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-windows-of-training-part", RANDOM,
        "ids = self._ids[split]", 'ids = self._ids["train"]',
        "random windows of the test part come from the training part",
        frozenset({EXACT, HAND}),
    ),
    PlantedBug(
        "gpt2-windows-drawn-anew-on-resume", f"{TRAINING}:GPTTrainer.train",
        'random_batch("train", windows_seed, step)',
        'random_batch("train", windows_seed, step - start)',
        "a run that goes on sees the windows of its beginning again",
        frozenset({EXACT, HAND}),
    ),
)
# fmt: on

GPT2_BUGS = (*GPT2_NUMBERS, *GPT2_RUNS)
