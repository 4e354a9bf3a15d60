// Numbers with units, as text. Pure.

const DASH = "–";

// Three significant digits, without an exponent.
export function digits(value) {
  if (!Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 100 || size === 0) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 0.001 || size === 0) return `${digits(value * 1000)} ms`;
  return `${digits(value * 1e6)} µs`;
}

// Without trailing zeros: for targets and axes, which are round numbers.
export function roundSeconds(value) {
  return seconds(value).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
}

// [number, unit], for tiles that set them in two sizes.
export function split(text) {
  const space = text.indexOf(" ");
  return space < 0 ? [text, ""] : [text.slice(0, space), text.slice(space + 1)];
}

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (Math.abs(value) >= 1000 && step < units.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${step === 0 ? Math.round(value) : digits(value)} ${units[step]}`;
}

export function rate(value) {
  return value === null || !Number.isFinite(value) ? DASH : `${bytes(value)}/s`;
}

export function count(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? DASH : Math.round(value).toLocaleString("en-US");
}

export function percent(share) {
  if (share === null || !Number.isFinite(share)) return DASH;
  // 99.96 % must not read as 100 %: somebody missed its target.
  const value = share === 1 ? 100 : Math.min(share * 100, 99.9);
  return `${value === 100 || value === 0 ? value : value.toFixed(1)} %`;
}

// "4:05", or "1:00:00" from an hour on.
export function minutes(value) {
  const whole = Math.max(0, Math.floor(value));
  const pad = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const rest = `${hours ? pad(Math.floor(whole / 60) % 60) : Math.floor(whole / 60) % 60}:${pad(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

export function clockTime(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

// Ids of 32 hex digits are cut in tables; the full id is in the panel and in the title.
export function shortId(id) {
  return id.length > 14 ? `${id.slice(0, 12)}…` : id;
}
