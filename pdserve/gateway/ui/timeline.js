// The time that the page shows, on the router's clock: following the feed, paused, or at a chosen time.

const SMOOTHING = 0.1; // of the difference between both clocks, so that a late frame does not shake the page

export function createTimeline(range, now = () => performance.now() / 1000) {
  let offsetS = null; // router's clock minus ours
  let periodS = 0.25;
  let heldS = null; // the time shown while paused
  const shown = { atS: -Infinity };

  function live() {
    const known = range();
    if (!known || offsetS === null) return null;
    // One period and a half behind, so that what moves has a known end; never beyond what was reported.
    const wanted = Math.min(now() + offsetS - 1.5 * periodS, known[1]);
    // Time does not run backwards when the offset is corrected.
    shown.atS = wanted < shown.atS && shown.atS - wanted < 2 ? shown.atS : wanted;
    return shown.atS;
  }

  return {
    canRun: true,
    isPlayback: false,
    speeds: null,
    hello(period) {
      periodS = period;
      offsetS = null;
      shown.atS = -Infinity;
    },
    received(atS) {
      const fresh = atS - now();
      offsetS = offsetS === null || Math.abs(fresh - offsetS) > 1 ? fresh : offsetS + SMOOTHING * (fresh - offsetS);
    },
    time() {
      if (heldS === null) return live();
      const known = range();
      // A page that stays paused for longer than the history moves with its oldest end.
      return known ? Math.min(Math.max(heldS, known[0]), known[1]) : null;
    },
    range,
    isPaused: () => heldS !== null,
    pause() {
      heldS ??= live();
    },
    resume() {
      heldS = null;
    },
    seek(atS) {
      heldS = atS;
    },
    // Wall-clock milliseconds of a time of the router.
    wallClock(atS) {
      return offsetS === null ? null : Date.now() + (atS - offsetS - now()) * 1000;
    },
  };
}
