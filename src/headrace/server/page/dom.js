// The few words of DOM that every part of the page needs.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text, never markup. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Tell a screen reader, once, politely. */
export function announce(text) {
  byId("announce").textContent = text;
}

const TIME = [
  [1e-3, 1e6, "µs"],
  [1, 1e3, "ms"],
  [Infinity, 1, "s"],
];

/** Seconds with three figures and a fitting unit. */
export function seconds(value) {
  const [, factor, unit] = TIME.find(([below]) => value < below);
  return `${figures(value * factor)} ${unit}`;
}

/** A number with three figures. */
export function figures(value) {
  const size = Math.abs(value);
  if (size >= 10000) return `${(value / 1000).toFixed(size >= 100000 ? 0 : 1)}k`;
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
