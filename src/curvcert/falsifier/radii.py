r"""Hunts for what refutes a certificate: margins climbed within 0.999 of each radius, and witnesses replayed.

A step goes along the direction that a p-ball is widest in for the gradient of :math:`f_i - f_y`, and back into the
ball along the line to the sample: so for every p.  The first start is the steepest point of the sphere, the
others are random.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.boxes import Box
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from curvcert.falsifier.ascent import column, known, unblocked, within
from curvcert.falsifier.counterexample import Counterexample, Kind, replay
from curvcert.falsifier.findings import Findings, together
from curvcert.network import Network
from curvcert.norms import steepest_direction, vector_norm

SHARE = 0.999
"""The share of a certified radius at which it is attacked."""

_UNLIMITED = 1e3
"""Where a radius is infinite, the attack goes this far, relative to 1 + ||x||."""
_SAME = 1e-6
"""Radii that are closer than this, relatively, are one claim."""
_ELEMENTS = 2**22
_LOOKED_AT = 3


@dataclass(frozen=True, eq=False)
class Claims:
    """Radii that a certificate claims, one per row: of which sample, against which rival (-1: all), by what name."""

    name: str
    sample: Tensor
    radius: Tensor
    rival: Tensor


def claims_of(cert: Certificate) -> list[Claims]:
    """Return every radius that a certificate claims, none twice.

    `radius` is about all classes; the radius by one method counts where it differs from that, and the radius of a
    single class where it is larger.
    """
    # Where it is misclassified a sample has no radius: one that is claimed is refuted by the sample itself.
    certified = cert.radius > 0
    found = [_all_classes("radius", cert.radius, certified)]
    for name, value in cert.radii.items():
        differs = (value - cert.radius).abs() > _SAME * cert.radius
        found.append(_all_classes(name, value, cert.correct & (value > 0) & differs))
    larger = cert.correct[:, None] & (cert.pair_radius > (1 + _SAME) * cert.radius[:, None])
    larger = larger.scatter(1, cert.label[:, None], False)
    sample, rival = larger.nonzero().unbind(dim=1)
    found.append(Claims("pair_radius", sample, cert.pair_radius[sample, rival], rival))
    return [claims for claims in found if len(claims.sample)]


def _all_classes(name: str, radius: Tensor, which: Tensor) -> Claims:
    sample = which.nonzero().flatten()
    return Claims(name, sample, radius[sample], torch.full_like(sample, -1))


def falsify(
    network: Network,
    x: Tensor,
    y: Tensor | None,
    cert: Certificate,
    restarts: int = 4,
    steps: int = 20,
    seed: int = 0,
) -> Findings:
    """Hunt for what refutes a certificate: returns what it found, nothing if the certificate is right.

    The margin is climbed from many starts within 0.999 of every radius that is claimed, in the certificate's norm;
    every witness is replayed.  What refutes a claim counts once a replay with bounded rounding confirms it.

    Args:
        network: the network.
        x: the inputs that were certified.
        y: their labels; the certificate's by default.
        cert: what `curvcert.certify` returned for them.
        restarts: starts of each ascent.
        steps: of each ascent.
        seed: of the starts.

    >>> from dataclasses import replace
    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> model = nn.Linear(1, 2).eval()
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0], [-1.0]])), model.bias.data.zero_()
    >>> net, x = trace(model, torch.zeros(1, 1)), torch.tensor([[0.5]])
    >>> cert = certify(net, x)
    >>> falsify(net, x, None, cert)
    Findings(2 checks: 1 radius, 1 witness; 0 violations)
    >>> falsify(net, x, None, replace(cert, radii={"lipschitz": cert.radius * 1.05})).counterexamples[0].kind
    'radius'
    """
    x = network.require_batch(x).to(network.device)
    if len(x) != len(cert):
        raise InvalidInput(f"The certificate has {len(cert)} samples, got {len(x)} inputs.")
    if y is not None and not bool((torch.as_tensor(y).to(cert.label) == cert.label).all()):
        raise InvalidInput("The labels are not those that were certified. Pass y=None, or the certificate's.")
    if restarts < 1 or steps < 1:
        raise InvalidInput(f"falsify needs at least one start and one step, got {restarts} and {steps}.")
    hunt = _Hunt(network, x, cert, restarts, steps, seed)
    return together(hunt.attack(claims) for claims in claims_of(cert)) + hunt.replay_witnesses()


@dataclass(frozen=True, eq=False)
class _Hunt:
    network: Network
    x: Tensor
    cert: Certificate
    restarts: int
    steps: int
    seed: int

    def attack(self, claims: Claims) -> Findings:
        """Attack every claim; the samples go in pieces that bound the memory."""
        size = max(1, _ELEMENTS // (self.restarts * self.x[0].numel()))
        rows = torch.arange(len(claims.sample), device=self.x.device)
        found = [self._attacked(claims, part) for part in rows.split(size)]
        counts = {"radius": len(rows)}
        return together(found) + Findings(counts, {f"attacked {claims.name}": len(rows)})

    def _attacked(self, claims: Claims, part: Tensor) -> Findings:
        sample, rival = claims.sample[part], claims.rival[part]
        x, label = self.x[sample], self.cert.label[sample]
        limit = _UNLIMITED * (1 + vector_norm(x.flatten(1), self.cert.p, dim=1))
        radius = SHARE * torch.minimum(claims.radius[part], limit)
        lead, where = self._climbed(x, label, rival, radius, self._box(sample.repeat(self.restarts)))
        broken = (lead >= 0).nonzero().flatten()
        worst = broken[lead[broken].argsort(descending=True)][:_LOOKED_AT].tolist()
        examples = (
            self._example("radius", claims.name, int(sample[k]), where[k], float(claims.radius[part[k]]), int(rival[k]))
            for k in worst
        )
        return _confirmed(examples, len(worst))

    def _climbed(
        self, x: Tensor, label: Tensor, rival: Tensor, radius: Tensor, box: Box | None
    ) -> tuple[Tensor, Tensor]:
        """Return the largest lead of a rival over the label that was met in each ball, and where."""
        count = len(x)
        x, label, rival, radius = (z.repeat(self.restarts, *(1,) * (z.dim() - 1)) for z in (x, label, rival, radius))
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.device)
        outward = steepest_direction(noise.flatten(1), self.cert.p)
        point, best = x, torch.full_like(radius, -torch.inf)
        where = x
        for k in range(self.steps + 1):
            lead, gradient = self._lead(point, label, rival)
            gradient = gradient if box is None else unblocked(gradient, point, box.sides(point))
            better = lead > best
            best, where = torch.where(better, lead, best), torch.where(column(better, x), point, where)
            direction = known(steepest_direction(gradient, self.cert.p), outward)
            if k == 0:
                # The first starts go straight to the steepest point of the sphere, the others to a random one.
                first = torch.arange(len(x), device=x.device) < count
                direction, size = torch.where(first[:, None], direction, outward), radius
            else:
                size = radius * 1.5 * 0.8 ** (k - 1)
            point = within(point + direction.reshape(x.shape) * column(size, x), x, radius, self.cert.p)
            # The box holds x, so that what is nearest to a point of the ball is in the ball as well.
            point = point if box is None else box.clamp(point)
        best, index = best.reshape(self.restarts, count).max(dim=0)
        return best, where.reshape(self.restarts, count, *x.shape[1:])[index, torch.arange(count, device=x.device)]

    def _box(self, sample: Tensor) -> Box | None:
        """Return what the balls about some of the samples are cut with, if the radii are about that alone."""
        return self.cert.box.part(sample) if self.cert.box is not None and self.cert.inside_box else None

    def _lead(self, point: Tensor, label: Tensor, rival: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            lead = _leads(self.network(point).flatten(1), label, rival)
            (gradient,) = torch.autograd.grad(lead.sum(), point)
        return lead.detach(), gradient.flatten(1)

    def replay_witnesses(self) -> Findings:
        """Evaluate every witness anew, measure its distance, and see that it is outside the certified ball."""
        cert = self.cert
        claimed = (cert.correct & cert.attack_radius.isfinite()).nonzero().flatten()
        if len(claimed) == 0:
            return Findings()
        points, label = cert.witness[claimed].to(self.x), cert.label[claimed]
        finite = points.flatten(1).isfinite().all(dim=1)
        safe = torch.where(column(finite, points), points, self.x[claimed])
        with torch.no_grad():
            lead = _leads(self.network(safe).flatten(1), label, torch.full_like(label, -1))
        distance = vector_norm((safe - self.x[claimed]).flatten(1), cert.p, dim=1)
        radius = cert.attack_radius[claimed]
        box = None if cert.box is None else cert.box.part(claimed)
        outside = torch.zeros_like(lead, dtype=torch.bool) if box is None else ~box.contains(safe)
        bad = ((lead <= 0) | (distance > radius) | outside).nonzero().flatten()[:_LOOKED_AT].tolist()
        inside = (distance < cert.radius[claimed]).nonzero().flatten()[:_LOOKED_AT].tolist()
        wrong = (self._example("witness", "witness", int(claimed[k]), safe[k], float(radius[k])) for k in bad)
        refuting = (
            self._example("radius", "radius", int(claimed[k]), safe[k], float(cert.radius[claimed[k]])) for k in inside
        )
        counts = {"witness": len(claimed)}
        return (
            _confirmed(wrong, len(bad))
            + _confirmed(refuting, len(inside))
            + Findings(counts, {"witness": len(claimed)})
        )

    def _example(
        self, kind: Kind, name: str, sample: int, point: Tensor, claimed: float, rival: int = -1
    ) -> Counterexample:
        x = self.x[sample]
        about_box = self.cert.box is not None and (self.cert.inside_box or kind == "witness")
        return Counterexample(
            kind=kind,
            source=f"{name} of {self.cert.method[sample]}",
            network=self.network,
            x=x,
            y=point,
            covector=x.new_zeros(self.network.outputs),
            p=self.cert.p,
            scope="global",
            centre=x,
            radius=0.0,
            claimed=min(claimed, torch.finfo(torch.float64).max),
            label=int(self.cert.label[sample]),
            rival=rival,
            box=self.cert.box.part(torch.tensor([sample])) if self.cert.box is not None and about_box else None,
        )


def _leads(logits: Tensor, label: Tensor, rival: Tensor) -> Tensor:
    """Return by how much the rival, or the best of all, leads over the label."""
    own = logits.gather(1, label[:, None]).squeeze(1)
    best = logits.scatter(1, label[:, None], -torch.inf).amax(dim=1)
    one = logits.gather(1, rival.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(rival < 0, best, one) - own


def _confirmed(examples: Iterator[Counterexample], looked_at: int) -> Findings:
    refuted = tuple(example for example in examples if replay(example).refuted)
    return Findings(counterexamples=refuted, unconfirmed=looked_at - len(refuted))
