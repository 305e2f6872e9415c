// What is wrong with the page as it is now, as sentences; run in it by test_page_access.py.
() => {
  const wrong = [];
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) &&
    !e.closest(".unseen, .skip, [inert]");
  const about = (e) => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""}.${e.className} ` +
    `"${(e.textContent || "").trim().slice(0, 30)}"`;
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const ground = (e) => {
    if (!e) return rgba("Canvas");
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own : [...over(own, ground(e.parentElement)), 1];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (e, color, opacity = 1) => {
    const behind = ground(e);
    const ink = rgba(color);
    ink[3] *= opacity;
    const [a, b] = [light(over(ink, behind)), light(behind)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  for (const e of document.querySelectorAll("body *")) {
    if (!seen(e)) continue;
    const style = getComputedStyle(e);
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (text && !e.closest("option, :disabled")) {
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      const found = contrast(e, style.color);
      if (found < (large ? 3 : 4.5)) wrong.push(`contrast ${found.toFixed(2)}: ${about(e)}`);
    }
    if (e.placeholder) {
      const placeholder = getComputedStyle(e, "::placeholder");
      const found = contrast(e, placeholder.color, Number(placeholder.opacity));
      if (found < 4.5) wrong.push(`contrast of the placeholder ${found.toFixed(2)}: ${about(e)}`);
    }
    if (e.matches("input, select, textarea")) {
      if (!e.labels?.length && !e.ariaLabel && !e.getAttribute("aria-labelledby")) {
        wrong.push(`no label: ${about(e)}`);
      }
    }
    if (e.matches("button, a[href], summary, input, select, textarea, [tabindex='0']")) {
      const { width, height } = e.getBoundingClientRect();
      const labelled = e.labels?.[0]?.getBoundingClientRect();
      const inText = e.matches("p a, li a");
      if (Math.max(width, labelled?.width ?? 0) < 24 || Math.max(height, labelled?.height ?? 0) < 24) {
        if (!inText) wrong.push(`small target ${width.toFixed(0)}x${height.toFixed(0)}: ${about(e)}`);
      }
      if (e.matches("button, a[href], summary") && !e.textContent.trim() && !e.ariaLabel) {
        wrong.push(`no name: ${about(e)}`);
      }
    }
    if (e.matches("canvas, svg, img") && !e.closest("[aria-hidden=true]") &&
        !(e.ariaLabel || e.alt || e.getAttribute("role") === "img" && e.ariaLabel)) {
      wrong.push(`a picture without words: ${about(e)}`);
    }
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls"]) {
      for (const id of (e.getAttribute(name) ?? "").split(" ").filter(Boolean)) {
        if (!document.getElementById(id)) wrong.push(`${name} names nothing: ${about(e)}`);
      }
    }
    if (!e.closest(".scroll, pre") && e.scrollWidth > innerWidth + 1 && style.overflowX === "visible") wrong.push(`too wide: ${about(e)}`);
  }
  let level = 0;
  for (const e of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!e.checkVisibility()) continue;
    const here = Number(e.tagName[1]);
    if (level && here > level + 1) wrong.push(`a heading of level ${here} after ${level}: ${about(e)}`);
    level = here;
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
  if ([...document.querySelectorAll("main")].filter((e) => e.checkVisibility()).length !== 1) {
    wrong.push("not exactly one main");
  }
  return wrong;
}
