// Numbers as people read them. An unknown number is "–", never 0.

export const NONE = "–";

/** 1234567 -> "1.2M". */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 9.995e5) return (value / 1e6).toFixed(value < 9.995e7 ? 1 : 0) + "M";
  if (value >= 9_999.5) return (value / 1e3).toFixed(value < 99_950 ? 1 : 0) + "k";
  return value % 1 && value < 99.95 ? value.toFixed(1) : String(Math.round(value));
}

/** Milliseconds as [number, unit]. */
export function time(ms) {
  if (ms === null || ms === undefined) return [NONE, ""];
  if (ms >= 59_950) return [(ms / 60_000).toFixed(1), "min"];
  if (ms >= 999.5) return [(ms / 1000).toFixed(ms >= 9_995 ? 1 : 2), "s"];
  return [ms >= 99.95 ? ms.toFixed(0) : ms >= 9.995 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
}

export const timeText = ms => time(ms).filter(Boolean).join(" ");

export function percent(share, digits = 1) {
  return share === null || share === undefined ? NONE : (share * 100).toFixed(digits) + " %";
}

/** A change: "+4.2 %". */
export const change = share => share === null || share === undefined ? NONE : (share >= 0 ? "+" : "−") + Math.abs(share * 100).toFixed(1) + " %";

export function span(seconds) {
  const d = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24, m = Math.floor(seconds / 60) % 60;
  return d ? `${d} d ${hours} h` : hours ? `${hours} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

/** The time of day, by this machine's clock. */
export const clock = text => new Date(text).toLocaleTimeString([], { hour12: false });

export const words = text => String(text).replaceAll("_", " ");
