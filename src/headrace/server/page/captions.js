// Segments of speech as SubRip and WebVTT, as `headrace transcribe --format srt` writes them.

/** 01:02:03,004 of seconds. */
export function clock(seconds, mark) {
  const thousandths = Math.round(seconds * 1000);
  const pad = (value, width = 2) => String(value).padStart(width, "0");
  const whole = Math.floor(thousandths / 1000);
  return `${pad(Math.floor(whole / 3600))}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}${mark}${pad(thousandths % 1000, 3)}`;
}

// No line may look like the times of a cue.
const line = ({ text }) => text.trim().replace(/\s+/g, " ").replaceAll("-->", "->");

export const srt = (segments) => segments
  .map((one, place) => `${place + 1}\n${clock(one.start, ",")} --> ${clock(one.end, ",")}\n${line(one)}\n\n`).join("");

export const vtt = (segments) => "WEBVTT\n\n" + segments
  .map((one) => `${clock(one.start, ".")} --> ${clock(one.end, ".")}\n${line(one)}\n\n`).join("");

export const text = (segments) => `${segments.map((one) => one.text).join("").trim()}\n`;
