// Numbers, times and sizes in words.

/** A number with four significant digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Seconds as 12 s, 3.4 min, 5.6 h, 7 d. */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  for (const [most, unit, word] of [[90, 1, "s"], [5400, 60, "min"], [129600, 3600, "h"]]) {
    if (seconds < most) return `${Number((seconds / unit).toPrecision(2))} ${word}`;
  }
  return `${Math.round(seconds / 86400)} d`;
}

/** How long ago a Unix time was. */
export const age = (time) => duration(Math.max(0, Date.now() / 1000 - time));

/** A Unix time as the reader's clock shows it. */
export const moment = (time) => new Date(time * 1000).toLocaleString();

/** A size in bytes as 1.2 MB. */
export function bytes(size) {
  const power = size > 0 ? Math.min(5, Math.floor(Math.log10(size) / 3)) : 0;
  return `${Number((size / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}
