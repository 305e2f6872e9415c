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

/** Keep it; the oldest go where there are too many or no room. Says whether it is kept. */
export function keep(id, messages) {
  const first = messages.find((message) => message.role === "user")?.content ?? "";
  const talk = { id, title: first.trim().replace(/\s+/g, " ").slice(0, 80) || "Untitled", changed: Date.now(), messages };
  const text = JSON.stringify(talk);
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
    return `## ${name[role] ?? role}\n\n${[content, ...called].filter(Boolean).join("\n\n")}\n`;
  });
  return `# ${title}\n\n${said.join("\n")}`;
}

/** As `headrace chat` saves and loads it. */
export const asJson = ({ messages }) => JSON.stringify({ messages }, null, 1);
