// TeX formulas as MathML, which browsers draw themselves: no fonts, no styles, no markup from text.
// A formula that is not understood is shown as its source.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const DEPTH = 32; // Of groups in each other.
const LONGEST = 4000; // Characters of a formula.

const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split("=")));

const LETTERS = table(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι
  kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ
  phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ
  Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅
  varnothing=∅ imath=ı jmath=ȷ top=⊤ bot=⊥ angle=∠ triangle=△ square=□ Box=□ blacksquare=■ degree=°
  dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ prime=′ wp=℘ dag=† dagger=† ddagger=‡ S=§ P=¶ checkmark=✓`);
const OPERATORS = table(`
  times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙
  wedge=∧ land=∧ vee=∨ lor=∨ cap=∩ cup=∪ setminus=∖ neg=¬ lnot=¬ leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠
  ll=≪ gg=≫ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃
  subseteq=⊆ supseteq=⊇ subsetneq=⊊ mid=∣ nmid=∤ parallel=∥ perp=⊥ forall=∀ exists=∃ nexists=∄
  to=→ rightarrow=→ longrightarrow=⟶ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹
  Longrightarrow=⟹ Leftarrow=⇐ impliedby=⟸ Leftrightarrow=⇔ iff=⟺ mapsto=↦ longmapsto=⟼
  uparrow=↑ downarrow=↓ Uparrow=⇑ Downarrow=⇓ hookrightarrow=↪ rightharpoonup=⇀ leadsto=⇝
  models=⊨ vdash=⊢ dashv=⊣ therefore=∴ because=∵ colon=: coloneqq=≔ lt=< gt=> doteq=≐ prec=≺
  succ=≻ preceq=⪯ succeq=⪰ asymp=≍ triangleq=≜ bowtie=⋈ vert=| lvert=| rvert=| Vert=‖ lVert=‖
  rVert=‖ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lbrace={ rbrace=} backslash=\\`);
const LARGE = table(`
  sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcap=⋂ bigcup=⋃ bigwedge=⋀ bigvee=⋁
  bigoplus=⨁ bigotimes=⨂`);
const NAMED = new Set(`arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom ker lg
  ln log sec sin sinh tan tanh Pr`.split(/\s+/));
const LIMITS = new Set("lim liminf limsup max min sup inf argmax argmin".split(" "));
const SPACES = new Map([[",", 0.17], [":", 0.22], [";", 0.28], [" ", 0.33], ["!", -0.17],
  ["quad", 1], ["qquad", 2], ["enspace", 0.5], ["thinspace", 0.17]]);
const ACCENTS = table(`
  hat=^ widehat=^ bar=¯ overline=‾ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ check=ˇ
  breve=˘ acute=´ grave=\` overbrace=⏞`);
const UNDER = table("underline=_ underbrace=⏟");
// Where the capital A, the small a and the digit 0 of an alphabet lie; those that lie elsewhere.
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2], mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};
Object.assign(ALPHABETS, { bm: ALPHABETS.boldsymbol, bf: ALPHABETS.mathbf, mathscr: ALPHABETS.mathcal });
const PLAIN = new Set(["mathrm", "operatorname", "operatorname*", "mathit", "mathnormal", "rm"]);
const WORDS = new Set(["text", "textbf", "textit", "textrm", "texttt", "mbox", "tag"]);
const FENCES = { matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""] };
const ALIGNED = new Set(["aligned", "align", "align*", "split", "gathered", "gather", "gather*",
  "equation", "equation*", "multline", "multline*"]);
const NOTHING = new Set(["displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nonumber",
  "notag", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "middle"]);

function make(name, attributes, ...children) {
  const element = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const row = (nodes) => (nodes.length === 1 ? nodes[0] : make("mrow", {}, ...nodes));
const operator = (text, attributes = {}) => make("mo", attributes, text);

function inAlphabet(letter, [capital, small, digit, others = {}]) {
  if (others[letter]) return others[letter];
  const code = letter.codePointAt(0);
  if (letter >= "A" && letter <= "Z") return String.fromCodePoint(capital + code - 65);
  if (letter >= "a" && letter <= "z") return String.fromCodePoint(small + code - 97);
  return digit && letter >= "0" && letter <= "9" ? String.fromCodePoint(digit + code - 48) : letter;
}

class Parser {
  constructor(source, display) {
    this.tokens = source.match(/\\(?:[a-zA-Z]+\*?|[^])|\s+|\d+(?:[.,]\d+)*|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.display = display;
  }

  space() {
    while (this.at < this.tokens.length && !this.tokens[this.at].trim()) this.at++;
  }

  peek() {
    this.space();
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new SyntaxError("the formula ends early");
    this.at++;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new SyntaxError(`no ${token}`);
  }

  /** The source between braces, as text. */
  raw() {
    this.expect("{");
    let text = "";
    for (let open = 1; ;) {
      const token = this.tokens[this.at++];
      if (token === undefined) throw new SyntaxError("a group has no end");
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) return text;
      if (token !== "{" && token !== "}") text += /^\\[^a-zA-Z]$/.test(token) ? token[1] : token;
    }
  }

  /** Nodes up to a token of `ends`, which is left. */
  nodes(...ends) {
    if (++this.depth > DEPTH) throw new SyntaxError("too deep");
    const found = [];
    for (let token = this.peek(); token !== undefined && !ends.includes(token); token = this.peek()) {
      if (token === "}" || token === "&" || token === "\\\\" || token === "\\right" || token === "\\end") {
        throw new SyntaxError(`${token} without its beginning`);
      }
      found.push(...this.scripted());
    }
    this.depth--;
    return found;
  }

  /** An argument: a group or one thing. */
  argument() {
    if (this.peek() !== "{") {
      if (++this.depth > DEPTH) throw new SyntaxError("too deep");
      const node = row(this.atom().nodes);
      this.depth--;
      return node;
    }
    this.next();
    const found = this.nodes("}");
    this.expect("}");
    return row(found);
  }

  /** A thing with what stands above and below it. */
  scripted() {
    const { nodes, limits } = ["^", "_"].includes(this.peek()) ? { nodes: [make("mrow", {})] } : this.atom();
    let over = null;
    let under = null;
    for (;;) {
      const token = this.peek();
      if (token === "'") {
        let primes = "";
        for (; this.peek() === "'"; this.next()) primes += "′";
        over = over ? make("mrow", {}, operator(primes), over) : operator(primes);
      } else if (token === "^" || token === "_") {
        this.next();
        const script = this.argument();
        if (token === "_") {
          if (under) throw new SyntaxError("two subscripts");
          under = script;
        } else over = over ? make("mrow", {}, over, script) : script;
      } else if (token === "\\limits" || token === "\\nolimits") this.next();
      else break;
    }
    if (!over && !under) return nodes;
    const base = nodes.pop() ?? make("mrow", {});
    const name = limits && (limits === "always" || this.display) ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (over && under) nodes.push(make(name[2], {}, base, under, over));
    else nodes.push(over ? make(name[1], {}, base, over) : make(name[0], {}, base, under));
    return nodes;
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (token[0] !== "\\") return token;
    const name = token.slice(1);
    return OPERATORS.get(name) ?? ({ "{": "{", "}": "}", "|": "‖" })[name] ?? "";
  }

  /** {nodes, limits}: the next thing without its scripts. */
  atom() {
    const token = this.next();
    if (token === "{") {
      const found = this.nodes("}");
      this.expect("}");
      return { nodes: [row(found)] };
    }
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return { nodes: [make("mn", {}, token)] };
    if (/^\p{L}/u.test(token)) return { nodes: [make("mi", {}, token)] };
    if (token === "~") return { nodes: [make("mspace", { width: "0.33em" })] };
    if ("()[]|/".includes(token)) return { nodes: [operator(token, { stretchy: "false" })] };
    return { nodes: [operator(token === "-" ? "−" : token === "*" ? "∗" : token)] };
  }

  command(name) {
    const one = (node, limits) => ({ nodes: [node], limits });
    if (LETTERS.has(name)) return one(make("mi", {}, LETTERS.get(name)));
    if (OPERATORS.has(name)) return one(operator(OPERATORS.get(name), /^[|‖⟨⟩⌊⌋⌈⌉{}∣∥]$/u.test(OPERATORS.get(name)) ? { stretchy: "false" } : {}));
    if (LARGE.has(name)) return one(operator(LARGE.get(name)), name.includes("int") ? undefined : "display");
    if (NAMED.has(name) || LIMITS.has(name)) return { nodes: [make("mi", {}, name), operator("\u2061")].slice(0, 1), limits: LIMITS.has(name) ? "display" : undefined };
    if (SPACES.has(name)) return one(make("mspace", { width: `${SPACES.get(name)}em` }));
    if (NOTHING.has(name)) return { nodes: [] };
    if (WORDS.has(name)) return one(make("mtext", {}, this.raw().replace(/^ | $/g, "\u00a0")));
    if (PLAIN.has(name)) return one(make("mi", { mathvariant: "normal" }, this.raw().replace(/\s+/g, "")), name.endsWith("*") ? "display" : undefined);
    if (ALPHABETS[name]) return one(this.alphabet(name));
    if (ACCENTS.has(name)) return one(make("mover", { accent: "true" }, this.argument(), operator(ACCENTS.get(name))), name === "overbrace" ? "always" : undefined);
    if (UNDER.has(name)) return one(make("munder", {}, this.argument(), operator(UNDER.get(name))), name === "underbrace" ? "always" : undefined);
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return one(make("mfrac", {}, this.argument(), this.argument()));
      case "binom": case "dbinom": case "tbinom":
        return one(make("mrow", {}, operator("("), make("mfrac", { linethickness: "0" }, this.argument(), this.argument()), operator(")")));
      case "sqrt": return one(this.root());
      case "overset": case "stackrel": {
        const over = this.argument();
        return one(make("mover", {}, this.argument(), over));
      }
      case "underset": {
        const under = this.argument();
        return one(make("munder", {}, this.argument(), under));
      }
      case "boxed": return one(make("mrow", { class: "boxed" }, this.argument()));
      case "phantom": return one(make("mphantom", {}, this.argument()));
      case "color": case "textcolor":
        this.raw();
        return name === "color" ? { nodes: [] } : one(this.argument());
      case "not": return one(operator(`${this.atom().nodes.map((node) => node.textContent).join("")}\u0338`));
      case "pmod": return one(make("mrow", {}, make("mspace", { width: "0.5em" }), operator("("), make("mi", {}, "mod"), make("mspace", { width: "0.3em" }), this.argument(), operator(")")));
      case "bmod": case "mod": return one(make("mo", { lspace: "0.3em", rspace: "0.3em" }, "mod"));
      case "left": {
        const open = this.delimiter();
        const found = this.nodes("\\right");
        this.expect("\\right");
        return one(make("mrow", {}, operator(open, { stretchy: "true" }), ...found, operator(this.delimiter(), { stretchy: "true" })));
      }
      case "begin": return one(this.environment(this.raw()));
      case "|": return one(operator("‖", { stretchy: "false" }));
    }
    if (name.length === 1 && !/[a-zA-Z]/.test(name)) return one(operator(name, "{}".includes(name) ? { stretchy: "false" } : {}));
    throw new SyntaxError(`\\${name} is not known`);
  }

  alphabet(name) {
    const text = this.peek() === "{" ? this.raw() : this.next();
    const greek = text.startsWith("\\") ? LETTERS.get(text.slice(1)) : undefined;
    if (text.startsWith("\\") && !greek) throw new SyntaxError(`${text} in \\${name}`);
    return make("mi", { mathvariant: "normal" }, greek ?? [...text.replace(/\s+/g, "")].map((letter) => inAlphabet(letter, ALPHABETS[name])).join(""));
  }

  root() {
    if (this.peek() !== "[") return make("msqrt", {}, this.argument());
    this.next();
    const degree = row(this.nodes("]"));
    this.expect("]");
    return make("mroot", {}, this.argument(), degree);
  }

  environment(name) {
    if (!FENCES[name] && !ALIGNED.has(name)) throw new SyntaxError(`${name} is not known`);
    if (name === "array" && this.peek() === "{") this.raw();
    const rows = [make("mtr", {})];
    for (;;) {
      const cell = this.nodes("&", "\\\\", "\\end");
      rows.at(-1).append(make("mtd", {}, ...cell));
      const token = this.next();
      if (token === "\\end") break;
      if (token === "\\\\") rows.push(make("mtr", {}));
    }
    if (this.raw() !== name) throw new SyntaxError(`${name} has another end`);
    if (rows.length > 1 && !rows.at(-1).textContent) rows.pop();
    const kind = ALIGNED.has(name) ? "aligned" : name === "cases" ? "cases" : "matrix";
    const made = make("mtable", { class: kind, ...(kind === "aligned" ? { displaystyle: "true" } : {}) }, ...rows);
    const [open, close] = FENCES[name] ?? ["", ""];
    if (!open && !close) return made;
    return make("mrow", {}, operator(open, { fence: "true" }), made, operator(close, { fence: "true" }));
  }
}

/** A formula as an element; `display`: on a line of its own. */
export function formula(source, display = false) {
  const text = source.trim();
  try {
    if (!text || text.length > LONGEST) throw new SyntaxError("empty or too long");
    const parser = new Parser(text, display);
    const found = parser.nodes();
    return make("math", { display: display ? "block" : "inline", alttext: text }, make("mrow", {}, ...found));
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    const code = document.createElement("code");
    if (display) code.className = "formula";
    code.textContent = text;
    return code;
  }
}
