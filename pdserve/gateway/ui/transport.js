// Pause, scrub, speed, and the text that says which time is shown.

import { setAttribute, setHidden, setText } from "./dom.js";
import { clockTime, minutes } from "./format.js";

export function createTransport({ pause, icon, label, scrub, text, toLive, speed }, timeline, onSeek) {
  if (timeline.speeds) {
    setHidden(speed, false);
    for (const value of timeline.speeds) speed.append(new Option(`${value}×`, String(value), value === 1, value === 1));
    speed.addEventListener("change", () => timeline.setSpeed(Number(speed.value)));
  }
  const toggle = () => (timeline.isPaused() ? timeline.resume() : timeline.pause());
  pause.addEventListener("click", toggle);
  toLive.addEventListener("click", () => timeline.resume());
  scrub.addEventListener("input", () => {
    const range = timeline.range();
    if (!range) return;
    // The slider counts back from the newest frame, so that it stays at "live" while frames arrive.
    timeline.seek(timeline.isPlayback ? range[0] + Number(scrub.value) : range[1] + Number(scrub.value));
    onSeek();
  });

  function update(atS) {
    const isPaused = timeline.isPaused();
    setAttribute(pause, "aria-pressed", String(isPaused));
    setAttribute(icon, "data-icon", isPaused ? "play" : "pause");
    setText(label, isPaused ? (timeline.isPlayback ? "Play" : "Resume") : "Pause");
    const range = timeline.range();
    setHidden(toLive, timeline.isPlayback || !isPaused);
    scrub.disabled = !range;
    if (!range || atS === null) return setText(text, "");
    const [first, last] = range;
    const length = last - first;
    const behind = last - atS;
    const [low, high, value] = timeline.isPlayback ? [0, length, atS - first] : [-length, 0, isPaused ? -behind : 0];
    setAttribute(scrub, "min", low.toFixed(1));
    setAttribute(scrub, "max", high.toFixed(1));
    scrub.value = value.toFixed(1);
    const wall = timeline.wallClock(atS);
    let said = isPaused ? `−${behind.toFixed(1)} s · ${clockTime(wall ?? 0)}` : "live";
    if (timeline.isPlayback) said = `${minutes(atS - first)} / ${minutes(length)}`;
    setText(text, said);
    setAttribute(scrub, "aria-valuetext", said);
  }

  return { toggle, update };
}
