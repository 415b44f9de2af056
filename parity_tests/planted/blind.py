"""Mistakes planted by someone who had not read the tests."""

from __future__ import annotations

from parity_tests.planted import PlantedBug

BLIND_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="clip-skips-short-gradients",
        place="numpy_impl.optim:AdamWOptimizer.clip_grad_norm",
        old="if not scale >= 1.0:",
        new="if not norm <= max_norm:",
        description="a norm of exactly max_norm (or inf against inf) is no longer scaled",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="stale-gradient-in-norm",
        place="numpy_impl.optim:AdamWOptimizer._gather",
        old="self.buffer.grad[rows] = 0.0",
        new="continue  # takes no part in the update",
        description="a parameter without a gradient counts in the norm with its previous one",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="assigned-gradient-not-adopted",
        place="numpy_impl.optim:AdamWOptimizer._gather",
        old="""\
            parameter.grad_view[...] = parameter.grad
            parameter.grad = parameter.grad_view
""",
        new="""\
            parameter.grad_view[...] = parameter.grad
""",
        description="the step gathers assigned gradients anew, so that clipping them is undone",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="zero-grad-keeps-zeros",
        place="torch_impl.optim:AdamWOptimizer.zero_grad",
        old="self.optimizer.zero_grad()",
        new="self.optimizer.zero_grad(set_to_none=False)",
        description="a parameter that the next loss does not reach decays and counts a step",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="moments-shared-with-state",
        place="torch_impl.optim:AdamWOptimizer.load_state",
        old="""\
            "exp_avg": _like(p, torch.tensor(state["exp_avg"][i], dtype=p.dtype)),
            "exp_avg_sq": _like(p, torch.tensor(state["exp_avg_sq"][i], dtype=p.dtype)),
""",
        new="""\
            "exp_avg": _like(p, torch.as_tensor(state["exp_avg"][i], dtype=p.dtype)),
            "exp_avg_sq": _like(p, torch.as_tensor(state["exp_avg_sq"][i], dtype=p.dtype)),
""",
        description="training on writes into the arrays of the state that was loaded",
        checks=frozenset({"other backend", "exact property"}),
    ),
    PlantedBug(
        name="linear-drawn-in-single-precision",
        place="torch_impl.layers:Linear.__init__",
        old="weight = rng.randn(out_features, in_features) * std",
        new="weight = (rng.randn(out_features, in_features) * std).astype(np.float32)",
        description="initial weights of a float64 model are rounded to float32",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="gelu-output-saturated",
        place="numpy_impl.functional:_gelu",
        old="phi *= z",
        new="phi *= np.clip(z, -GELU_SATURATED, GELU_SATURATED)",
        description="values above the bound that protects the cube come out as the bound",
        checks=frozenset({"other backend", "complex step", "a priori bound", "by hand"}),
    ),
    PlantedBug(
        name="embedding-gradient-by-prefix-sums",
        place="numpy_impl.functional:embedding",
        old="""\
        dtable = np.zeros_like(table.data)
""",
        new="""\
        dtable = np.zeros_like(table.data)
        order = np.argsort(ids, axis=None, kind="stable")
        rows, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        sums = np.cumsum(grad.reshape(-1, grad.shape[-1])[order], axis=0)
        ends = np.append(starts[1:], order.size) - 1
        dtable[rows] = np.diff(sums[ends], axis=0, prepend=0.0)
        return dtable, None
""",
        description="segment sums as differences of prefix sums cancel, and spread inf over rows",
        checks=frozenset({"other backend", "exact property", "a priori bound", "by hand"}),
    ),
    PlantedBug(
        name="ids-shared-with-caller",
        place="numpy_impl.functional:check_ids",
        old="return ids.astype(np.int64)",
        new="return ids.astype(np.int64, copy=False)",
        description="a batch buffer refilled between forward and backward changes the gradient",
        checks=frozenset({"other backend", "exact property"}),
    ),
    PlantedBug(
        name="causal-mask-bottom-right",
        place="torch_impl.functional:causal_attention",
        old="np.tri(q.shape[-2], k.shape[-2], dtype=bool)",
        new="np.tri(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2], dtype=bool)",
        description="with more keys than queries the mask is aligned to the end, as for a cache",
        checks=frozenset({"other backend", "exact property", "by hand"}),
    ),
    PlantedBug(
        name="graph-freed-at-root-only",
        place="numpy_impl.tape:gradients_of",
        old="""\
    if not retain_graph:
        for node in done:
            if node.gradient_fn is not None:
                node.gradient_fn, node.parents = _freed, ()
""",
        new="""\
    if not retain_graph and root.gradient_fn is not None:
        root.gradient_fn, root.parents = _freed, ()
""",
        description="a second loss on the same inner tensors runs through without an error",
        checks=frozenset({"other backend", "by hand"}),
    ),
    PlantedBug(
        name="mask-bound-from-normal-numbers",
        place="numpy_impl.gpt:check_mask_value",
        old="np.finfo(dtype).smallest_subnormal",
        new="np.finfo(dtype).tiny",
        description="fills whose exponential is subnormal pass, and the future leaks",
        checks=frozenset({"other backend", "exact property", "by hand"}),
    ),
    PlantedBug(
        name="sampler-normalises-first",
        place="gpt_parity.sampling:sample",
        old="""\
    cumulative = np.cumsum(weights)
    # `right` steps over ids of weight 0. The largest number below 1 times the last sum rounds
    # to less than that sum, so the place found is always inside.
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
""",
        new="""\
    cumulative = np.cumsum(weights / weights.sum())
    # `right` steps over ids of weight 0.
    place = np.searchsorted(cumulative, uniform, side="right")
""",
        description="probabilities that sum to just below 1 leave no id for the largest numbers",
        checks=frozenset({"exact property", "by hand"}),
    ),
    PlantedBug(
        name="span-or-one",
        place="gpt_parity.schedule:WarmupCosineScheduler.__call__",
        old="span = max(1, self.total_steps - self.warmup_steps)",
        new="span = self.total_steps - self.warmup_steps or 1",
        description="a warm-up longer than the run skips the peak of the cosine",
        checks=frozenset({"exact property", "by hand"}),
    ),
    PlantedBug(
        name="rate-follows-trainer-steps",
        place="gpt_parity.training:GPTTrainer.train",
        old="scheduler(step)",
        new="scheduler(self.steps)",
        description="a second call of train goes on with the schedule where the first one ended",
        checks=frozenset({"by hand"}),
    ),
    PlantedBug(
        name="last-metrics-line-short",
        place="gpt_parity.training_run:Run.after_step",
        old="mean = self.loss_sum / self.loss_count",
        new="mean = self.loss_sum / min(step, self.config.log_every)",
        description="the mean loss of a last line of fewer than log_every steps is too small",
        checks=frozenset({"by hand"}),
    ),
    PlantedBug(
        name="moments-named-in-model-order",
        place="gpt_parity.checkpoint:_optimizer_names",
        old="return [names[id(parameter)] for parameter in optimizer.parameters]",
        new="return list(names.values())",
        description="an optimizer with two like-shaped parameters exchanged saves under both names",
        checks=frozenset({"exact property", "by hand"}),
    ),
    PlantedBug(
        name="decoder-drops-byte-order-mark",
        place="gpt_parity.corpus:read_corpus",
        old='text = data.decode("utf-8")',
        new='text = data.decode("utf-8-sig")',
        description="a second mark, which is data, goes too; offsets of bad bytes are 3 too small",
        checks=frozenset({"by hand"}),
    ),
)
