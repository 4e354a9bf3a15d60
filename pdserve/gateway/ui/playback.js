// Plays a recording: hands its frames to the store as time passes, and has the interface of a timeline.

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];

export function createPlayback(frames, store, keepS, now = () => performance.now() / 1000) {
  const beginS = frames[0].at_s;
  const endS = frames.at(-1).at_s;
  let next = 0; // the first frame that the store does not have
  let atS = beginS;
  let sinceS = null; // our clock when `atS` was right; null while paused
  let speed = 1;

  // The store is given frames up to `time`; going back fills it again with the minutes before.
  function load(time) {
    if (next > 0 && time < frames[next - 1].at_s) {
      store.clear();
      next = 0;
    }
    if (next < frames.length && frames[next].at_s < time - keepS) {
      store.clear();
      while (frames[next].at_s < time - keepS) next += 1;
    }
    // One frame ahead, so that what moves between two frames has a known end.
    while (next < frames.length && (next === 0 || frames[next - 1].at_s <= time)) {
      store.ingest(frames[next]);
      next += 1;
    }
  }

  function advance() {
    if (sinceS !== null) {
      const nowS = now();
      atS = Math.min(atS + (nowS - sinceS) * speed, endS);
      sinceS = atS === endS ? null : nowS;
    }
    load(atS);
    return atS;
  }

  return {
    isPlayback: true,
    speeds: SPEEDS,
    speed: () => speed,
    setSpeed(value) {
      advance();
      speed = value;
    },
    time: advance,
    range: () => [beginS, endS],
    isPaused: () => sinceS === null,
    pause() {
      advance();
      sinceS = null;
    },
    resume() {
      if (atS === endS) atS = beginS;
      sinceS = now();
    },
    seek(time) {
      atS = Math.min(Math.max(time, beginS), endS);
      if (sinceS !== null) sinceS = now();
    },
    wallClock: () => null,
  };
}
