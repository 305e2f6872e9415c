// Conversations kept in this browser (localStorage), with bounds: nothing of them leaves it.
// A browser that keeps nothing (private windows, full disks) still chats.

const ROOT = "headrace.talk.";
const OPEN = "headrace.open";
const SETTINGS = "headrace.settings";
const MOST = 100;
const MOST_CHARACTERS = 1 << 20; // Of one conversation.

function quietly(work, otherwise = null) {
  try {
    return work();
  } catch {
    return otherwise;
  }
}

const KINDS = { image_url: "Picture", video_url: "Video" };
const kind = (part) => KINDS[part.type] ?? "Sound";

/** The text of a message's content, which may be in parts. */
export const plain = (content) => (Array.isArray(content)
  ? content.map((part) => part.text ?? `[${kind(part).toLowerCase()}]`).join("\n\n") : content);

const read = (name) => quietly(() => JSON.parse(localStorage.getItem(name)));

/** {id, title, changed, messages} of each, the newest first; what is damaged is left out. */
export function all() {
  const names = quietly(() => Object.keys(localStorage), []).filter((name) => name.startsWith(ROOT));
  return names.map(read).filter((talk) => talk?.id && Array.isArray(talk.messages))
    .sort((a, b) => b.changed - a.changed);
}

export const find = (id) => read(ROOT + id);
export const lastOpen = () => quietly(() => localStorage.getItem(OPEN));
export const remember = (id) => quietly(() => localStorage.setItem(OPEN, id));
export const fresh = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;

/** A conversation with its title: {id, title, changed, messages}. */
export function titled(id, messages) {
  const content = messages.find((message) => message.role === "user")?.content ?? "";
  // Files come first in a message, what was typed last.
  const first = Array.isArray(content) ? content.at(-1).text || content[0].text || kind(content[0]) : content;
  return { id, title: first.trim().replace(/\s+/g, " ").slice(0, 80) || "Untitled", changed: Date.now(), messages };
}

/** Keep it; the oldest go where there are too many or no room. Says whether it is kept. */
export function keep(id, messages) {
  const text = JSON.stringify(titled(id, messages));
  if (text.length > MOST_CHARACTERS) return false;
  const others = all().filter((other) => other.id !== id);
  for (const old of others.splice(MOST - 1)) remove(old.id);
  for (;;) {
    if (quietly(() => (localStorage.setItem(ROOT + id, text), true), false)) return true;
    const oldest = others.pop();
    if (!oldest) return false;
    remove(oldest.id);
  }
}

export const remove = (id) => quietly(() => localStorage.removeItem(ROOT + id));

export const settings = () => read(SETTINGS) ?? {};
export const keepSettings = (values) => quietly(() => localStorage.setItem(SETTINGS, JSON.stringify(values)));

/** As text for people. */
export function asText({ title, messages }) {
  const name = { user: "You", assistant: "Model", tool: "Tool", system: "System" };
  const said = messages.map(({ role, content, tool_calls: calls }) => {
    const called = (calls ?? []).map((call) => `${call.function.name}(${call.function.arguments})`);
    return `## ${name[role] ?? role}\n\n${[plain(content), ...called].filter(Boolean).join("\n\n")}\n`;
  });
  return `# ${title}\n\n${said.join("\n")}`;
}

/** As `headrace chat` saves and loads it: texts are strings; one with a sound or a picture stays in parts. */
export const asJson = ({ messages }) => JSON.stringify({
  messages: messages.map((message) => (Array.isArray(message.content) && message.content.every((part) => part.type === "text")
    ? { ...message, content: plain(message.content) } : message)),
}, null, 1);
