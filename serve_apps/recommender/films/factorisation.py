"""Matrix factorisation of ratings with a posterior for each vector, and fold-in of a user in closed form. NumPy alone.

A rating of user u and item i is modelled as mean + p_u . q_i + b_u + c_i + noise. Users' vectors z_u = [p_u, b_u] and
items' z_i = [q_i, c_i] are Gaussian, and each half-sweep solves for the posterior of one side, mean and covariance,
given that of the other. This is alternating least squares whose normal equations also have the other side's
covariances: what is known of an item from two ratings weighs less than what is known from two hundred. The precisions
and the noise are estimated as well, so there is no regularisation to tune. Source: Y. J. Lim and Y. W. Teh,
"Variational Bayesian approach to movie rating prediction", KDD Cup 2007, equations 8 to 14; biases are one more column.

Called by the trainer and by each web request. Owns no file and imports neither Django nor torch.

Legend: U users, I items, N ratings, K factors, D = K + 1 with the bias, P = D (D + 1) / 2 entries of a triangle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHUNK_RATINGS = 1 << 12  # gathered at once: 3 MB at ten factors, which stay in the cache; 40 MB take twice as long
MIN_STARS, MAX_STARS = 0.5, 5.0
MIN_NOISE = 1e-4  # ratings without any noise leave no posterior


@dataclass(frozen=True)
class ItemPosterior:
    """All that folding in a user needs.

    mean, noise:      of all ratings; variance of a rating around its prediction
    user_precisions:  [D] of the users' prior, around zero
    item_precisions:  [D] of the items' prior
    vectors:          [I, D] posterior means of [q_i, c_i]
    covariances:      [I, P] posterior covariances, upper triangles by rows
    """

    mean: float
    noise: float
    user_precisions: Floats
    item_precisions: Floats
    vectors: Floats
    covariances: Floats

    @property
    def num_items(self) -> int:
        return len(self.vectors)


def start(num_items: int, num_factors: int, mean: float, noise: float = 1.0, seed: int = 0) -> ItemPosterior:
    """A posterior before the first sweep: small random factors, no biases."""
    size = num_factors + 1
    vectors = np.random.default_rng(seed).normal(0.0, 0.1, (num_items, size))
    vectors[:, -1] = 0.0
    covariances = np.tile(pack(0.01 * np.eye(size)), (num_items, 1))
    return ItemPosterior(mean, noise, np.full(size, 5.0), np.full(size, 5.0), vectors, covariances)


def extend(items: ItemPosterior, num_items: int) -> ItemPosterior:
    """The same with items that were added since: they have the prior, mean zero."""
    more = num_items - items.num_items
    prior = np.tile(pack(np.diag(1.0 / items.item_precisions)), (more, 1))
    vectors = np.concatenate([items.vectors, np.zeros((more, items.vectors.shape[1]))])
    return replace(items, vectors=vectors, covariances=np.concatenate([items.covariances, prior]))


def fold_in(items: ItemPosterior, rated: Ints, ratings: Floats) -> Floats:
    """The posterior mean [D] of a user from the full history: `rated` items [H] and their `ratings` [H].

    One D x D system: (diag(precisions) + sum E[x x'] / noise) z = sum (x (r - mean) - E[x c]) / noise with x = [q, 1].
    A user without ratings has the prior's mean, zero. Raises DataError for an item outside of [0, I), and for a rating
    that is no finite number.
    """
    _check("rated", rated, items.num_items)
    _check_finite(ratings)
    x, bias = split(items.vectors[rated])
    covariance = unpack(items.covariances[rated].sum(0), x.shape[1])
    left, right = x.T @ x, x.T @ (ratings - items.mean - bias)
    left[:-1, :-1] += covariance[:-1, :-1]
    right[:-1] -= covariance[:-1, -1]
    return np.linalg.solve(left / items.noise + np.diag(items.user_precisions), right / items.noise)


def score(items: ItemPosterior, user: Floats) -> Floats:
    """Predicted ratings [I] of a user [D], not clipped."""
    vectors = items.vectors
    scores: Floats = vectors[:, :-1] @ user[:-1] + vectors[:, -1] + (items.mean + user[-1])
    return scores


def find_best(items: ItemPosterior, user: Floats, rated: Ints, count: int) -> tuple[Ints, Floats]:
    """The `count` items [C] with the highest predictions that the user has not rated, the best first; and these [C],
    clipped to the scale of stars. Raises DataError for a rated item outside of [0, I)."""
    _check("rated", rated, items.num_items)
    scores = score(items, user)
    scores[rated] = -np.inf
    count = min(count, len(scores) - len(np.unique(rated)))
    best = np.argpartition(-scores, count - 1)[:count] if count else np.zeros(0, np.int64)
    best = best[np.argsort(-scores[best], kind="stable")]
    return best, scores[best].clip(MIN_STARS, MAX_STARS)


def predict(items: ItemPosterior, users: Floats, user: Ints, item: Ints) -> Floats:
    """Predictions [N] for pairs, by the users' vectors [U, D], not clipped."""
    z, q = users[user], items.vectors[item]
    predicted: Floats = np.einsum("nk,nk->n", z[:, :-1], q[:, :-1]) + z[:, -1] + q[:, -1] + items.mean
    return predicted


class Ratings:
    """Ratings of U users and I items, ordered by either side. Arrays `user`, `item`, `rating` [N], each pair once.

    Raises DataError for a user outside of [0, U), an item outside of [0, I), and a rating that is no finite number.
    """

    def __init__(self, user: Ints, item: Ints, rating: Floats, num_users: int, num_items: int) -> None:
        _check("user", user, num_users)
        _check("item", item, num_items)
        _check_finite(rating)
        self.user, self.item, self.rating = user, item, np.asarray(rating, np.float64)
        self.num_users, self.num_items = num_users, num_items
        self._by_user, self._by_item = np.argsort(user, kind="stable"), np.argsort(item, kind="stable")
        self.of_users = _Side(user, item, self.rating, self._by_user, num_users)
        self.of_items = _Side(item, user, self.rating, self._by_item, num_items)


class _Side:
    """The ratings in the order of one side: `starts` and `ends` of each of its rows, and the other side's rows."""

    def __init__(self, own: Ints, other: Ints, rating: Floats, order: Ints, num_rows: int) -> None:
        counts = np.bincount(own, minlength=num_rows)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.other, self.rating = other[order], rating[order]
        self.present = np.flatnonzero(counts)

    def chunks(self) -> list[Ints]:
        """The rows that have ratings, in runs of about CHUNK_RATINGS ratings."""
        marks = self.ends[self.present] // CHUNK_RATINGS
        return np.split(self.present, np.flatnonzero(np.diff(marks)) + 1) if len(self.present) else []


def fit(
    ratings: Ratings, num_factors: int, num_sweeps: int, begin: ItemPosterior | None = None, seed: int = 0
) -> tuple[ItemPosterior, Floats]:
    """Alternate for `num_sweeps`, from `begin` or from random factors: the items, and users [U, D] folded into them.

    Items and users without ratings have the prior. Raises DataError when there is no rating at all.
    """
    if not len(ratings.rating):
        raise DataError("ratings", 0, "there is none to learn from", "give at least one")
    if is_new := begin is None:
        begin = start(ratings.num_items, num_factors, float(ratings.rating.mean()), seed=seed)
    items = begin
    for sweep in range(num_sweeps):  # before two sweeps the residual is that of random factors, not noise
        items = run_sweep(ratings, items, learns_noise=not is_new or sweep > 1)
    return items, refit_users(ratings, items)


def refit_users(ratings: Ratings, items: ItemPosterior) -> Floats:
    """The vectors [U, D] of all users with the items fixed: `fold_in` of each, in batches."""
    means, _ = solve_side(
        ratings.of_users, ratings.num_users, items.vectors, items.covariances, items.user_precisions, items
    )
    return means


def run_sweep(ratings: Ratings, items: ItemPosterior, *, learns_noise: bool = True) -> ItemPosterior:
    """Users given items, items given users, then precisions and noise."""
    user_means, user_covariances = solve_side(
        ratings.of_users, ratings.num_users, items.vectors, items.covariances, items.user_precisions, items
    )
    user_precisions = estimate_precisions(user_means, user_covariances)
    means, covariances = solve_side(
        ratings.of_items, ratings.num_items, user_means, user_covariances, items.item_precisions, items
    )
    item_precisions = estimate_precisions(means, covariances)
    updated = replace(
        items,
        user_precisions=user_precisions,
        item_precisions=item_precisions,
        vectors=means,
        covariances=covariances,
    )
    if not learns_noise:
        return updated
    return replace(updated, noise=estimate_noise(ratings, updated, user_means, user_covariances))


def solve_side(
    side: _Side, num_rows: int, other: Floats, other_covariances: Floats, precisions: Floats, model: ItemPosterior
) -> tuple[Floats, Floats]:
    """Posterior means [R, D] and covariances [R, P] of one side's rows, given the other's [S, D] and [S, P].

    Rows without ratings have the prior. Each chunk gathers the moments of its ratings, sums them by row, and inverts
    all its D x D systems in one call.
    """
    size = other.shape[1]
    x, bias = split(other)
    rows, columns = np.triu_indices(size)
    moments = x[:, rows] * x[:, columns]
    is_factor = columns < size - 1  # the constant 1 of x has no covariance
    moments[:, is_factor] += other_covariances[:, is_factor]
    cross = x * bias[:, None]
    cross[:, :-1] += other_covariances[:, (columns == size - 1) & (rows < size - 1)]
    gathered = np.concatenate([moments, cross, x], axis=1)  # [S, P + 2 D]

    means = np.zeros((num_rows, size))
    covariances = np.tile(pack(np.diag(1.0 / precisions)), (num_rows, 1))
    for chunk in side.chunks():
        part = slice(side.starts[chunk[0]], side.ends[chunk[-1]])
        values = gathered[side.other[part]]
        values[:, -size:] *= (side.rating[part] - model.mean)[:, None]
        sums = np.add.reduceat(values, side.starts[chunk] - part.start, axis=0) / model.noise
        left = unpack(sums[:, : len(rows)], size)
        left[:, np.arange(size), np.arange(size)] += precisions
        inverse = np.linalg.inv(left)
        right = sums[:, -size:] - sums[:, len(rows) : -size]
        means[chunk] = (inverse @ right[:, :, None])[:, :, 0]
        covariances[chunk] = inverse[:, rows, columns]
    return means, covariances


def estimate_precisions(means: Floats, covariances: Floats) -> Floats:
    """[D]: the number of rows over the sum of their second moments."""
    size = means.shape[1]
    variances = covariances[:, diagonal(size)]
    precisions: Floats = len(means) / (np.square(means).sum(0) + variances.sum(0))
    return precisions


def estimate_noise(ratings: Ratings, items: ItemPosterior, users: Floats, user_covariances: Floats) -> float:
    """The mean of E[(rating - prediction)^2], with factors' covariances taken as diagonal between the two sides."""
    size = users.shape[1]
    residual = ratings.rating - predict(items, users, ratings.user, ratings.item)
    user_variance, item_variance = user_covariances[:, diagonal(size)], items.covariances[:, diagonal(size)]
    user_square, item_square = np.square(users[:, :-1]), np.square(items.vectors[:, :-1])
    # p^2 var(q) + var(p) q^2 + var(p) var(q) = (p^2 + var(p)) (q^2 + var(q)) - p^2 q^2, and the biases' variances
    full = np.einsum(
        "nk,nk->n",
        (user_square + user_variance[:, :-1])[ratings.user],
        (item_square + item_variance[:, :-1])[ratings.item],
    )
    of_means = np.einsum("nk,nk->n", user_square[ratings.user], item_square[ratings.item])
    variance = full - of_means + user_variance[ratings.user, -1] + item_variance[ratings.item, -1]
    return max(float((np.square(residual) + variance).mean()), MIN_NOISE)


def _check(field: str, positions: Ints, count: int) -> None:
    """Raises DataError unless all are positions in [0, count)."""
    is_wrong = (positions < 0) | (positions >= count)
    if len(positions) and positions.dtype.kind not in "iu":
        is_wrong = positions == positions
    if is_wrong.any():
        wrong = positions[is_wrong][0].item()
        raise DataError(field, wrong, f"is no position below {count}", "give whole numbers from 0, as in `films`")


def _check_finite(ratings: Floats) -> None:
    if not (is_finite := np.isfinite(ratings)).all():
        raise DataError("rating", float(ratings[~is_finite][0]), "is no rating", "leave it out")


def split(vectors: Floats) -> tuple[Floats, Floats]:
    """The regressors x = [q, 1], [N, D], and the biases [N], of vectors [q, c]."""
    x = vectors.copy()
    x[:, -1] = 1.0
    return x, vectors[:, -1]


def diagonal(size: int) -> Ints:
    """Where the diagonal lies in an upper triangle by rows: [D]."""
    rows, columns = np.triu_indices(size)
    return np.flatnonzero(rows == columns)


def pack(matrix: Floats) -> Floats:
    """The upper triangle of a symmetric matrix [D, D], by rows: [P]."""
    packed: Floats = matrix[np.triu_indices(len(matrix))]
    return packed


def unpack(packed: Floats, size: int) -> Floats:
    """Symmetric matrices [..., D, D] of upper triangles [..., P]."""
    rows, columns = np.triu_indices(size)
    full = np.empty((*packed.shape[:-1], size, size))
    full[..., rows, columns] = packed
    full[..., columns, rows] = packed
    return full
