// Light or dark as the reader chose, before the page is drawn; without a choice as the system has it.
// No module: it runs before the styles are applied.

(() => {
  const KEY = "headrace.theme";
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;

  function read() {
    try {
      const kept = localStorage.getItem(KEY);
      return CHOICES.includes(kept) ? kept : "system";
    } catch {
      return "system";
    }
  }

  function apply(choice) {
    if (choice === "system") root.removeAttribute("data-theme");
    else root.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) {
      button.setAttribute("aria-label", `Colours: ${choice}`);
      button.title = `Colours: ${choice}`;
    }
    document.dispatchEvent(new Event("themechange"));
  }

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").onclick = () => {
      const next = CHOICES[(CHOICES.indexOf(root.dataset.theme ?? "system") + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // A browser that keeps nothing has the choice until the page is left.
      }
      apply(next);
    };
  });
})();
