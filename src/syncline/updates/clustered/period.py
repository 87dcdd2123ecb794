"""What a cluster does with its means in a period of several batches, and with what the outer round at the end gave.

    brought    = sum of the cluster's means, which goes to the outer round; its result is R
    difference = R - brought
    last step  : mean + difference - what was forecast       so R is the sum of what was stepped on in the period

That is the whole-period correction. With a *forecast*, each further batch steps on mean + w difference / batches: the
own mean tells what is new, the period before how the mean of all clusters differs from it. So clusters that see
different data keep to the common way within a period too, and not only at its end. These are the control variates of
SCAFFOLD (Karimireddy et al., 2020), made of what is exchanged anyway: no traffic, and one more vector.
The weight w below 1 is for where clusters are many or their rate is high: a forecast as a whole may then swing up.
Where no other cluster is left, the outer round has no result: what was forecast in the period is taken back, and
nothing is forecast any more.
"""

from __future__ import annotations

from syncline.updates.flat import Vector


class Period:
    """One rank's sum over the batches of a period. All members of a cluster hold the same, to the bit."""

    def __init__(self, *, forecast_weight: float) -> None:
        self._forecast_weight = forecast_weight
        self._forecast: Vector | None = None
        """How the mean of all clusters differs from the own one in a batch, times its weight."""
        self._brought: Vector | None = None
        self._num_means = 0

    def step_on(self, mean: Vector | None) -> Vector | None:
        """Take the mean of a batch that is not the last; return what to step on, None if nobody had data."""
        self._take(mean)
        return mean if mean is None or self._forecast is None else mean.copy().add(self._forecast)

    def bring(self, mean: Vector | None) -> Vector | None:
        """Take the mean of the last batch; return what goes to the outer round, None if nobody had data."""
        self._take(mean)
        return self._brought

    def end(self, mean: Vector | None, result: Vector | None) -> Vector | None:
        """Take the outer round's result, None if nobody had data; return what to step on in the last batch."""
        brought, num_means = self._brought, self._num_means
        self._brought, self._num_means = None, 0
        if result is None:
            return self._take_back(mean, num_means)
        difference = result.copy() if brought is None else result.copy().add(brought, factor=-1.0)
        step_on = difference.copy() if mean is None else difference.copy().add(mean)
        if self._forecast is not None:
            step_on.add(self._forecast, factor=-float(num_means - (mean is not None)))
        step_on.presence.copy_(result.presence if mean is None else result.presence + mean.presence)
        if self._forecast_weight > 0.0 and num_means:
            self._forecast = difference.scale(self._forecast_weight / num_means)
            self._forecast.presence.copy_(result.presence)
        return step_on

    def forget(self) -> None:
        """Forecast nothing in the next period: the cluster is another one."""
        self._forecast = None

    def _take_back(self, mean: Vector | None, num_means: int) -> Vector | None:
        """Return the last step of a period in which the own means turned out to be those of all."""
        forecast = self._forecast
        if forecast is None or not num_means:
            return mean  # without any data nothing was forecast, and other clusters may be there
        self._forecast = None
        step_on = forecast.copy().scale(-float(num_means - (mean is not None)))
        if mean is not None:
            step_on.add(mean)
        step_on.presence.copy_(forecast.presence if mean is None else forecast.presence + mean.presence)
        return step_on

    def _take(self, mean: Vector | None) -> None:
        if mean is not None:
            self._brought = mean.copy() if self._brought is None else self._brought.add(mean)
            self._num_means += 1
