// A text as a file of the reader's machine.

import { make } from "./dom.js";

export function save(name, kind, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A name for the file of something with this title. */
export const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 40) || "conversation";
