"""A Gaussian posterior over the parameters of any `nn.Module`, and its priors; independent of images."""

from byov.posterior import priors
from byov.posterior.newton import NewtonVariances
from byov.posterior.posterior import Posterior, Prediction, Prior
from byov.posterior.segments import Segment, Segments

__all__ = ["NewtonVariances", "Posterior", "Prediction", "Prior", "Segment", "Segments", "priors"]
